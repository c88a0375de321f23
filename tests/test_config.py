from pathlib import Path

import pytest

from minitron import config_file
from minitron.config import Config, ConfigError, DataConfig, ModelConfig, TrainConfig

REPOSITORY = Path(__file__).parents[1]


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_file_keeps_the_defaults_of_what_it_leaves_out(tmp_path):
    text = "[model]\nnum_layers = 7\n[train]\nlearning_rate = 1\n"
    loaded = config_file.load(write(tmp_path, text))
    assert loaded == Config(ModelConfig(num_layers=7), train=TrainConfig(learning_rate=1.0))
    assert isinstance(loaded.train.learning_rate, float)


def test_dictionaries_and_back():
    original = Config(ModelConfig(family="gpt", width=64), DataConfig(path=Path("x/y")))
    assert config_file.from_dict(config_file.to_dict(original)) == original


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.toml")), ids=str)
def test_every_config_of_ours_loads(path):
    config_file.load(path)


@pytest.mark.parametrize(("text", "message"), [
    ("[modell]\n", "unknown key 'modell'; did you mean model?"),
    ("[model]\nnum_layer = 3\n", "model: unknown key 'num_layer'; did you mean num_layers?"),
    ("[model]\nzzz = 3\n", "unknown key 'zzz'; known are family, vocab_size"),
    ("[model]\nnum_layers = 2.5\n", "model.num_layers = 2.5: must be of type int, not float"),
    ("[model]\nnum_layers = true\n", "must be of type int, not bool"),
    ("[model]\nfamily = 'bert'\n", "model.family = 'bert': must be one of gpt, llama"),
    ("model = 3\n", "model = 3: must be a table of keys"),
    ("[model\n", "not valid TOML"),
    ("[train]\nsteps = 0\n", "train.steps = 0: must be greater than 0"),
    ("[train]\nsteps = -3\n", "train.steps = -3"),
    ("[train]\nwarmup_steps = -1\n", "train.warmup_steps = -1: must be 0 or more"),
    ("[train]\nlearning_rate = nan\n", "train.learning_rate = nan: must be greater than 0"),
    ("[train]\nbeta2 = 1.0\n", "train.beta2 = 1.0: must be from 0 to less than 1"),
    ("[train]\nmin_learning_rate = 0.1\n", "train.min_learning_rate = 0.1 is above"),
    ("[train]\nhang_timeout = 3600\n", "train.hang_timeout = 3600: PyTorch ends a collective"),
    ("[model]\nwidth = 130\n", "model.width = 130 is not a multiple of model.num_heads = 4: "
                               "try --model.width 136"),
    ("[model]\nnum_kv_heads = 3\n", "model.num_heads = 4 is not a multiple of model.num_kv_heads"
                                    " = 3"),
    ("[model]\nwidth = 12\n", "model.width / model.num_heads = 3 is odd"),
    ("[model]\nfamily = 'gpt'\nnum_kv_heads = 2\n", "grouped-query attention is llama's"),
    ("[model]\ndropout = 1.0\n", "model.dropout = 1.0"),
    ("[model]\nvocab_size = -1\n", "model.vocab_size = -1: must be 0 or more"),
    ("[train]\nrecompute = 'full'\ncompile = true\n", "a compiled model decides itself"),
    ("[data]\nsequence_length = 500\n", "data.sequence_length = 500 is longer than "
                                        "model.max_sequence_length = 128"),
    ("[parallel]\ndp = -1\n", "parallel.dp = -1: must be 0 or more"),
    ("[parallel]\nzero = 4\n", "zero = 4: must be one of 0, 1, 2, 3"),
    ("[parallel]\nzero = 1\nsync_every_micro_batch = false\n",
     "sync_every_micro_batch = False with parallel.zero = 1: below stage 2"),
    ("[parallel]\nzero = 3\n[train]\ncompile = true\n", "keeps the weights that stage 3 frees"),
])
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        config_file.load(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_file_is_met_with_the_nearest_name(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"there is no such file; did you mean .*run\.toml\?"):
        config_file.load(tmp_path / "rnu.toml")
