import dataclasses
import math
from pathlib import Path

import pytest

from minitron.config import (
    Config,
    ConfigError,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from minitron.config import file as config_file

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modell]\n", "unknown key 'modell'; did you mean model?"),
        ("[model]\nnum_layer = 3\n", "model: unknown key 'num_layer'; did you mean num_layers?"),
        ("[model]\nzzz = 3\n", "unknown key 'zzz'; choose from family, vocab_size"),
        ("[model]\nnum_layers = 2.5\n", "model.num_layers = 2.5: must be of type int, not float"),
        ("[model]\nnum_layers = true\n", "must be of type int, not bool"),
        ("[model]\nfamily = 'bert'\n", "model.family = 'bert': must be one of gpt, llama"),
        ("model = 3\n", "model = 3: must be a table of keys"),
        ("[model\n", "not valid TOML"),
        ("[train]\nsteps = 0\n", "train.steps = 0: must be greater than 0"),
        ("[train]\nsteps = -3\n", "train.steps = -3"),
        ("[train]\nwarmup_steps = -1\n", "train.warmup_steps = -1: must be 0 or more"),
        ("[train]\nlearning_rate = nan\n", "train.learning_rate = nan: must be a finite number"),
        ("[train]\nbeta2 = 1.0\n", "train.beta2 = 1.0: must be from 0 to less than 1"),
        ("[train]\nmin_learning_rate = 0.1\n", "train.min_learning_rate = 0.1 is above"),
        ("[train]\nhang_timeout = 3600\n", "train.hang_timeout = 3600: PyTorch ends a collective"),
        (
            "[model]\nwidth = 130\n",
            "model.width = 130 is not a multiple of model.num_heads = 4: try --model.width 136",
        ),
        (
            "[model]\nnum_kv_heads = 3\n",
            "model.num_heads = 4 is not a multiple of model.num_kv_heads = 3",
        ),
        ("[model]\nwidth = 12\n", "model.width / model.num_heads = 3 is odd"),
        ("[model]\nfamily = 'gpt'\nnum_kv_heads = 2\n", "attention needs model.family = llama"),
        ("[model]\ndropout = 1.0\n", "model.dropout = 1.0"),
        ("[model]\nvocab_size = -1\n", "model.vocab_size = -1: must be 0 or more"),
        ("[train]\nrecompute = 'full'\ncompile = true\n", "torch.compile decides itself which"),
        (
            "[data]\nsequence_length = 500\n",
            "data.sequence_length = 500 is longer than model.max_sequence_length = 128",
        ),
        ("[parallel]\ndp = -1\n", "parallel.dp = -1: must be 0 or more"),
        ("[parallel]\nzero = 4\n", "zero = 4: must be one of 0, 1, 2, 3"),
        (
            "[parallel]\nzero = 1\nsync_every_micro_batch = false\n",
            "sync_every_micro_batch = False with parallel.zero = 1: below stage 2",
        ),
        ("[parallel]\nzero = 3\n[train]\ncompile = true\n", "keeps the weights that stage 3 frees"),
        (
            "[parallel]\nzero = 1\noverlap_gather = true\n[train]\ncompile = true\n",
            "breaks the compiled graph; switch it off",
        ),
        ("[parallel]\nzero = 3\noverlap_gather = true\n", "only stages 1 and 2 gather weights"),
        ("[parallel]\ncp = 0\n", "parallel.cp = 0: must be greater than 0"),
        ("[parallel]\ncp = 2\ncontext = 'rings'\n", "must be one of ring, all-gather, ulysses"),
        (
            "[parallel]\ncontext = 'ulysses'\n",
            "parallel.context = ulysses with parallel.cp = 1: the "
            "sequence is not divided inside attention; set ",
        ),
        (
            "[parallel]\ncp = 3\n",
            "data.sequence_length = 128 is not divisible by 2 x parallel.cp = 6: use 132",
        ),
        (
            "[data]\nsequence_length = 120\n[parallel]\ncp = 3\n",
            "model.max_sequence_length = 128 is not divisible by 2 x parallel.cp = 6: use 132",
        ),
        (
            "[parallel]\ncp = 8\ntp = 16\nsequence = true\n",
            "is not divisible by 2 x parallel.cp x "
            "parallel.tp = 256 (parallel.sequence is on): use 256",
        ),
        (
            "[model]\ndropout = 0.1\n[parallel]\ncp = 2\n",
            "model.dropout = 0.1 with parallel.cp = 2: "
            "context-parallel attention has no dropout; set model.dropout to 0",
        ),
        (
            "[parallel]\ncp = 2\n[train]\ncompile = true\n",
            "train.compile with parallel.cp = 2: "
            "messages inside attention are not compiled; switch it off",
        ),
        ("[parallel]\nzero = true\n", "parallel.zero = True: must be one of 0, 1, 2, 3"),
        ("[parallel]\nzero = 1.0\n", "parallel.zero = 1.0: must be one of 0, 1, 2, 3"),
        ("[parallel]\nsequence = 1\n", "parallel.sequence = 1: must be of type bool, not int"),
        ("[train]\nclip_norm = true\n", "train.clip_norm = True: must be of type float, not bool"),
        ("[data]\npath = 3\n", "data.path = 3: must be a path, not int"),
        ("[data]\npath = 'a\\u0000b'\n".replace("'", '"'), "cannot hold a null character"),
        ("[model]\nnorm_eps = inf\n", "model.norm_eps = inf: must be a finite number"),
        ("[model]\nnorm_eps = 2.0\n", "model.norm_eps = 2.0: must be 1 or less"),
        ("[model]\nrope_theta = inf\n", "model.rope_theta = inf: must be a finite number"),
        ("[model]\nrope_theta = 1e300\n", "model.rope_theta = 1e+300: must be 1,000,000,000,000"),
        ("[model]\nrope_theta = 0.1\n", "model.rope_theta = 0.1: must be 1 or more"),
        ("[model]\nrope_scaling = inf\n", "model.rope_scaling = inf: must be a finite number"),
        ("[model]\nrope_scaling = 1e30\n", "model.rope_scaling = 1e+30: must be 1,000,000"),
        ("[train]\nweight_decay = inf\n", "train.weight_decay = inf: must be a finite number"),
        (
            "[train]\nweight_decay = 400\n",
            "train.weight_decay = 400 with train.learning_rate = 0.003:"
            " a step would take away all of a weight",
        ),
        (f"[train]\nlearning_rate = 1{400 * '0'}\n", "must be less than 2**63"),
        (f"[train]\nsteps = {2**63}\n", "must be less than 2**63"),
        (f"[train]\nsteps = {5000 * '9'}\n", "not valid TOML: Exceeds the limit"),
        (f"[train]\nsteps = {5000 * '['}\n", "nested too deeply"),
        (
            "[model]\nwidth = 999999997\nnum_heads = 2\nnum_kv_heads = 1\n",
            "try --model.width 1000000000",
        ),
        (f"[model]\nwidth = {2**62}\n", "must be 1,000,000,000 or less"),
        ("[model]\nnum_layers = 1000000\n", "model.num_layers = 1000000: must be 2,000 or less"),
        (f"[train]\ndevice = {2000 * 'x'!r}\n".replace("device", "precision"), "(2,0"),
        ('[train]\nprecision = "fp\\n32\\u001b"\n', "must be one of"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        config_file.load(write(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_misspelt_file_is_met_with_the_nearest_name(tmp_path):
    write(tmp_path, "")
    with pytest.raises(ConfigError, match=r"there is no such file; did you mean .*run\.toml\?"):
        config_file.load(tmp_path / "rnu.toml")


def test_fields_are_checked_in_one_place_whoever_sets_them():
    """From Python too: every field refuses a value of another type, and an infinite one."""
    for section in (ModelConfig, DataConfig, TrainConfig, ParallelConfig, LogConfig):
        for field in dataclasses.fields(section):
            others = [object(), None, [1]] + [math.inf, math.nan] * (field.type is float)
            for value in others:
                with pytest.raises(ConfigError, match=rf"\.{field.name} = .*: must be "):
                    section(**{field.name: value})


def test_an_error_is_one_short_line_whatever_a_file_says():
    error = str(ConfigError("a\nb\x1b[31m\udcff " + 5000 * "9" + " end"))
    assert error.startswith(r"a\nb\x1b[31m\udcff 99999") and error.endswith("end")
    assert "(5,000 characters)" in error and len(error) < 120
