"""Runs and weights that an attacker has written: nothing is executed, and each is told in one line.

The attacker has the source: checksums, which have no key, are made anew after each change.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minitron import checkpoint, cli, train
from minitron.checkpoint.storage import TABLE, read_table
from minitron.config import Config, DataConfig, ModelConfig, TrainConfig, command_line
from minitron.hugging_face.folder import export
from minitron.parallel.parts import Chunks
from minitron.system.disk import write_json
from minitron.system.files import file_in, read_json
from tests.tiers import tiered

MODEL = ModelConfig(
    max_sequence_length=32,
    num_layers=2,
    width=32,
    num_heads=2,
    num_kv_heads=1,
    ffn_width=48,
    tied_embedding=False,
)
TRAIN = TrainConfig(
    steps=4,
    global_batch_size=4,
    micro_batch_size=4,
    eval_every=0,
    eval_sequences=2,
    checkpoint_every=2,
    device="cpu",
)
SECONDS = 900  # a pipe that is opened would wait for ever


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A hundred runs of nearly nothing: on a busy machine threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    def give_up(*args):
        raise AssertionError(f"still waiting after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def original(stories, tmp_path_factory) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4, and its export."""
    folder = tmp_path_factory.mktemp("original")
    train.train(Config(MODEL, DataConfig(stories, sequence_length=32), TRAIN), folder / "run")
    export(folder / "run", folder / "model")
    (folder / "data.json").write_text(json.dumps(str(stories)))
    return folder


@pytest.fixture
def strangers(original, tmp_path) -> Path:
    """A copy of the run with its last checkpoint alone, and of the exported model."""
    shutil.copytree(original, tmp_path / "strangers")
    shutil.rmtree(tmp_path / "strangers" / "run" / "checkpoints" / "step_00000002")
    return tmp_path / "strangers"


def dispatch(args: list[str]) -> int:
    """As `minitron` does, but for the report that follows training."""
    if args[0] == "train":
        return train.exit_code(train.start(train.read_options(args[1:])))
    return cli.dispatch(args)


def minitron(capsys, monkeypatch, *words) -> tuple[int, list[str]]:
    """Exit code and lines of stderr of a command; an unexpected fault passes through."""
    monkeypatch.setattr(sys, "argv", ["minitron", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        command_line.run(dispatch)
    return caught.value.code, capsys.readouterr().err.splitlines()


@pytest.fixture
def refused(capsys, monkeypatch, strangers) -> Callable:
    """Whether a command ends with code 2 and one line on what was wrong, which is returned."""

    def run(*words) -> str:
        code, lines = minitron(capsys, monkeypatch, *words)
        assert code == 2, lines
        assert lines[-1].startswith("minitron: ") and len(lines[-1]) < 1000
        assert all("damaged (" in line for line in lines[:-1])
        assert str(strangers) in lines[-1] or "model." in lines[-1], "another reason"
        assert "delete" not in lines[-1] and "is longer than" not in lines[-1]
        return lines[-1]

    return run


def rehash(path: Path, facts: dict | None = None) -> None:
    """Make the manifest fit what the attacker has done."""
    manifest = json.loads((path / "manifest.json").read_text())
    files = {
        file.name: checkpoint.describe(file)
        for file in path.iterdir()
        if file.name != "manifest.json" and file.is_file()
    }
    write_manifest(path, {"files": files, "facts": facts or manifest["facts"]})


def write_manifest(path: Path, content: dict) -> None:
    text = json.dumps(content, sort_keys=True)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps({"sha256": sha256} | content))


# Code


class Payload:
    """Executed by whoever unpickles it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def of_an_earlier_version(path: Path, payload: Payload) -> None:
    for file in path.glob("rank_*"):
        file.unlink()
    (path / TABLE).unlink()
    (path / ".metadata").write_bytes(pickle.dumps(payload))
    torch.save(payload, path / "__0_0.distcp")


def in_place_of(name: str) -> Callable:
    def act(path: Path, payload: Payload) -> None:
        (path / name).write_bytes(pickle.dumps(payload))

    return act


def saved_by_torch(path: Path, payload: Payload) -> None:
    torch.save(payload, path / "rank_00000.safetensors")


def beside(path: Path, payload: Payload) -> None:
    """As `.metadata`, where torch.distributed.checkpoint would look for it first."""
    (path / ".metadata").write_bytes(pickle.dumps(payload))


PAYLOADS = {
    "a pickled checkpoint": of_an_earlier_version,
    "a pickle beside it": beside,
    "the table": in_place_of(TABLE),
    "the tensors": in_place_of("rank_00000.safetensors"),
    "torch.save": saved_by_torch,
    "the manifest": in_place_of("manifest.json"),
}


@pytest.mark.parametrize("place", tiered(PAYLOADS))
def test_nothing_in_a_checkpoint_is_executed(strangers, tmp_path, refused, place):
    payload, path = Payload(tmp_path / "executed"), strangers / "run/checkpoints/step_00000004"
    PAYLOADS[place](path, payload)
    if place != "the manifest":
        rehash(path)
    for words in commands(strangers):
        told = refused(*words)
        assert place != "a pickled checkpoint" or "earlier version" in told
    assert not payload.marker.exists()
    pickle.loads(pickle.dumps(payload))  # it does work
    assert payload.marker.exists()


def commands(folder: Path) -> list[list]:
    """All that read a checkpoint."""
    return [
        [
            "train",
            "--resume",
            "--run-dir",
            folder / "run",
            "--train.steps",
            "6",
            "--train.continuation",
            "stretch",
        ],
        ["export", folder / "run", folder / "out"],
    ]


def test_nothing_else_in_a_run_is_executed(strangers, tmp_path, refused):
    payload = Payload(tmp_path / "executed")
    (strangers / "run" / "config.json").write_bytes(pickle.dumps(payload))
    assert "config.json: damaged (" in refused(*commands(strangers)[0])
    assert not payload.marker.exists()


def test_a_tokenizer_of_a_run_is_not_executed(strangers, tmp_path, refused):
    payload = Payload(tmp_path / "executed")
    (strangers / "run" / "tokenizer.json").write_bytes(pickle.dumps(payload))
    for words in commands(strangers):
        assert "run/tokenizer.json: not a tokenizer (" in refused(*words)
    assert not payload.marker.exists() and not (strangers / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_nothing_in_weights_is_executed(strangers, tmp_path, refused, name):
    payload = Payload(tmp_path / "executed")
    (strangers / "model" / name).write_bytes(pickle.dumps(payload))
    (strangers / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(payload))
    refused(*start_from(strangers))
    assert not payload.marker.exists()


def start_from(folder: Path) -> list:
    """Train from the weights, with a config file of the user's own."""
    data = json.loads((folder / "data.json").read_text())
    (folder / "mine.toml").write_text(
        f"[data]\npath = {data!r}\nsequence_length = 32\n[train]\nsteps = 1\nwarmup_steps = 0\n"
        "global_batch_size = 2\neval_sequences = 2\ndevice = 'cpu'\n"
    )
    return [
        "train",
        folder / "mine.toml",
        "--weights",
        folder / "model",
        "--run-dir",
        folder / "new",
    ]


def test_what_an_attacker_did_not_change_is_read(strangers, capsys, monkeypatch):
    """Or the tests above would prove nothing."""
    for words in (*commands(strangers), start_from(strangers)):
        code, lines = minitron(capsys, monkeypatch, *words)
        assert code == 0, lines


# Checkpoints that state what is not so

HUGE = 10**4000


def edit(file: Path, act: Callable[[dict], object]) -> None:
    table = json.loads(file.read_text())
    act(table)
    file.write_text(json.dumps(table))


def edit_embedding(**changes) -> Callable:
    def act(path: Path) -> None:
        edit(path / TABLE, lambda table: table["model.token_embedding.weight"].update(changes))

    return act


def edit_box(place: int, value) -> Callable:
    def act(path: Path) -> None:
        def change(table: dict) -> None:
            table["model.token_embedding.weight"]["boxes"][0][place] = value

        edit(path / TABLE, change)

    return act


def table_is(text: str) -> Callable:
    return lambda path: (path / TABLE).write_text(text)


def without(name: str) -> Callable:
    return lambda path: edit(path / TABLE, lambda table: table.pop(name))


def other_tensors(change: Callable[[dict], dict]) -> Callable:
    def act(path: Path) -> None:
        file = path / "rank_00000.safetensors"
        save_file(change(load_file(file)), file)

    return act


def of_mersenne(path: Path) -> None:
    """A state of random numbers that is none, at the end of a file of the same length."""
    tensors = load_file(path / "rank_00000.safetensors")
    tensors["random.cpu.0"].fill_(255)
    save_file(tensors, path / "rank_00000.safetensors")


TABLES = {
    "a list": table_is("[]"),
    "empty": table_is(""),
    "null": table_is("null"),
    "a number": table_is("7"),
    "deep lists": table_is("[" * 5000 + "]" * 5000),
    "deep": table_is('{"a":' * 5000 + "1" + "}" * 5000),
    "rather deep": table_is('{"a":' * 300 + "1" + "}" * 300),
    "5,000 digits": table_is('{"a": ' + "9" * 5000 + "}"),
    "a key twice": table_is('{"a": 1, "a": 2}'),
    "not UTF-8": lambda path: (path / TABLE).write_bytes(b'{"\xff\xfe": 1}'),
    "no tensors": table_is("{}"),
    "entry is a list": table_is('{"model.token_embedding.weight": []}'),
    "dtype": edit_embedding(dtype="O"),
    "dtype is a list": edit_embedding(dtype=[]),
    "other dtype": edit_embedding(dtype="BF16"),
    "strings": edit_embedding(shape=["720", "32"]),
    "negative": edit_embedding(shape=[-720, -32]),
    "NaN": edit_embedding(shape=[float("nan"), 32]),
    "true": edit_embedding(shape=[True, 32]),
    "float": edit_embedding(shape=[720.0, 32.0]),
    "petabytes": edit_embedding(shape=[2**25, 2**25]),
    "more than 64 bits": edit_embedding(shape=[2**70, 32]),
    "dims": edit_embedding(shape=[1] * 99),
    "no boxes": edit_embedding(boxes=[]),
    "box is a dict": edit_embedding(boxes=[{}]),
    "huge box": edit_embedding(shape=[2**40], boxes=[[[0], [2**40], "rank_00000.safetensors"]]),
    "negative offset": edit_box(0, [-1, 0]),
    "offset": edit_box(0, [1, 0]),
    "other dims": edit_box(0, [0]),
    "no file": edit_box(2, "rank_00009.safetensors"),
    "up": edit_box(2, "../../../secret.safetensors"),
    "absolute": edit_box(2, "/etc/passwd"),
    "file is null": edit_box(2, None),
    "line break": edit_box(2, "rank_00000.safetensors\n"),
    "missing parameter": without("model.final_norm.weight"),
    "missing state": without("optimizer.final_norm.weight.exp_avg"),
    "other shapes in the file": other_tensors(
        lambda tensors: {name: value.flatten() for name, value in tensors.items()}
    ),
    "none of them in the file": other_tensors(
        lambda tensors: {f"x{name}": value for name, value in tensors.items()}
    ),
    "numbers of another kind": other_tensors(
        lambda tensors: {
            name: value.to(torch.float16) if value.dim() > 1 else value
            for name, value in tensors.items()
        }
    ),
    "random": of_mersenne,
    "boxes overlap, and the volume is right": edit_embedding(
        shape=[4], boxes=[[[start], [2], "rank_00000.safetensors"] for start in (0, 1)]
    ),
}


@pytest.mark.parametrize("harm", tiered(TABLES))
def test_what_a_checkpoint_states_is_checked(strangers, refused, harm):
    path = strangers / "run/checkpoints/step_00000004"
    TABLES[harm](path)
    rehash(path)
    resume, export = commands(strangers)
    refused(*resume)
    if harm not in ("missing state", "random"):  # which nobody needs for an export
        refused(*export)
        assert not list((strangers / "out").glob("*")) or not (strangers / "out").exists()
    assert path.is_dir() and not list(path.parent.glob("*.damaged"))


def test_boxes_that_touch_fill_a_tensor_and_boxes_that_overlap_do_not(tmp_path):
    def table_of(shape: list[int], *boxes) -> None:
        write_json(
            tmp_path / TABLE,
            {
                "x": {
                    "dtype": "F32",
                    "shape": shape,
                    "boxes": [[*box, "rank_00000.safetensors"] for box in boxes],
                }
            },
        )

    (tmp_path / "rank_00000.safetensors").write_bytes(bytes(1000))
    for shape, boxes in (
        ([4], [([0], [2]), ([2], [2])]),
        ([], [([], [])]),
        ([2, 4], [([0, 2], [2, 2]), ([0, 0], [1, 2]), ([1, 0], [1, 2])]),
    ):
        table_of(shape, *boxes)
        assert len(read_table(tmp_path).storage_data) == len(boxes)
    for shape, boxes in (
        ([4], [([0], [2]), ([1], [2])]),
        ([4], [([2], [2]), ([2], [2])]),
        ([2, 4], [([0, 0], [2, 2]), ([0, 1], [2, 2])]),
    ):
        table_of(shape, *boxes)
        with pytest.raises(ValueError, match="boxes of 'x' do not fill it"):
            read_table(tmp_path)


def facts(**changes) -> Callable:
    def act(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        rehash(path, manifest["facts"] | changes)

    return act


def config(section: str, **changes) -> Callable:
    def act(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["facts"]["config"][section] |= changes
        rehash(path, manifest["facts"])

    return act


def manifest_is(text: str) -> Callable:
    return lambda path: (path / "manifest.json").write_text(text)


def manifest_of(files, facts=None) -> Callable:
    return lambda path: write_manifest(path, {"files": files, "facts": facts or {"step": 4}})


MANIFESTS = {
    "a list": manifest_is("[]"),
    "null": manifest_is("null"),
    "a string": manifest_is('"x"'),
    "a number": manifest_is("4"),
    "empty": manifest_is(""),
    "deep": manifest_is('{"a":' * 5000 + "1" + "}" * 5000),
    "deep lists": manifest_is("[" * 5000 + "]" * 5000),
    "rather deep": manifest_is('{"a":' * 300 + "1" + "}" * 300),
    "5,000 digits": manifest_is('{"sha256": ' + "9" * 5000 + "}"),
    "not UTF-8": lambda path: (path / "manifest.json").write_bytes(b'{"\xff": 1}'),
    "a folder": lambda path: [(path / "manifest.json").unlink(), (path / "manifest.json").mkdir()],
    "a pipe": lambda path: [(path / "manifest.json").unlink(), os.mkfifo(path / "manifest.json")],
    "a link to a device": lambda path: [
        (path / "manifest.json").unlink(),
        (path / "manifest.json").symlink_to("/dev/zero"),
    ],
    "files are a list": manifest_of([1, 2]),
    "files are null": manifest_of(None),
    "an entry is a list": manifest_of({"tensors.json": [1]}),
    "an entry is a string": manifest_of({"tensors.json": "x"}),
    "bytes are a string": manifest_of({"tensors.json": {"bytes": "1", "sha256": "x"}}),
    "up": manifest_of({"../../config.json": {"bytes": 1, "sha256": "x"}}),
    "absolute": manifest_of({"/etc/passwd": {"bytes": 1, "sha256": "x"}}),
    "a null byte": manifest_of({"a\0b": {"bytes": 1, "sha256": "x"}}),
    "a name of 5,000 letters": manifest_of({"a" * 5000: {"bytes": 1, "sha256": "x"}}),
    "another step": facts(step=2),
    "step is a string": facts(step="4"),
    "step": facts(step=None),
    "facts are a list": manifest_of({}, [1]),
}
FACTS = {
    "position is a string": facts(position="16"),
    "position is huge": facts(position=10**30),
    "position is negative": facts(position=-16),
    "position": facts(position=None),
    "position is NaN": facts(position=float("nan")),
    "ranks": facts(num_ranks="1"),
    "fingerprint": facts(fingerprint=7),
    "another fingerprint": facts(fingerprint="x"),
    "a loss scale": facts(loss_scale={"value": 1.0, "good_steps": 0, "skipped": 0}),
    "a loss scale that is none": facts(loss_scale=[]),
    "a continuation is a list": facts(continued=[0, 0.0]),
    "a continuation of nothing": facts(continued={"start": 3}),
    "a continuation in the future": facts(continued={"start": 5, "last_rate": 0.1}),
    "a continuation at the end": facts(continued={"start": 4, "last_rate": 0.1}),
    "a continuation without end": facts(continued={"start": 2, "last_rate": float("inf")}),
    "config is a list": facts(config=[]),
    "config is null": facts(config=None),
    "config is empty": facts(config={}),
    "config has strings": facts(config={"model": "x"}),
    "section is a list": facts(config={"model": [1]}),
    "unknown": config("model", spoon=1),
    "a width of letters": config("model", width="32"),
    "NaN": config("model", norm_eps=float("nan")),
    "another width": config("model", width=64),
    "wide": config("model", width=2**40, num_heads=1),
    "wider": config("model", width=2**70),
    "layers": config("model", num_layers=10**9),
    "vocabulary": config("model", vocab_size=10**9),
    "no vocabulary": config("model", vocab_size=0),
}


@pytest.mark.parametrize("harm", tiered(MANIFESTS))
def test_a_manifest_may_be_anything_and_the_older_one_is_found(original, tmp_path, harm):
    shutil.copytree(original / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000004"
    MANIFESTS[harm](newest)
    told = checkpoint.damage(newest)
    assert isinstance(told, str) and "\n" not in told and len(told) < 300
    assert checkpoint.newest_good(newest.parent).name == "step_00000002"


@pytest.mark.parametrize("harm", tiered(["a list", "deep", "a pipe"]))
def test_a_run_goes_on_from_the_older_one(original, tmp_path, capsys, monkeypatch, harm):
    shutil.copytree(original / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step_00000004"
    MANIFESTS[harm](newest)
    for words in reversed(commands(tmp_path)):
        assert minitron(capsys, monkeypatch, *words)[0] == 0
    assert (newest.parent / "step_00000004.damaged").exists()


@pytest.mark.parametrize("harm", tiered(MANIFESTS | FACTS))
def test_what_a_manifest_states_is_checked(strangers, refused, harm):
    path = strangers / "run/checkpoints/step_00000004"
    (MANIFESTS | FACTS)[harm](path)
    resume, export = commands(strangers)
    refused(*resume)
    if harm in MANIFESTS or "config" in harm or harm in list(FACTS)[-9:]:
        refused(*export)
    assert path.is_dir() and not list(path.parent.glob("*.damaged"))  # nothing was changed


def test_files_that_would_block_or_lead_away(strangers, refused, tmp_path):
    path = strangers / "run/checkpoints/step_00000004"
    tensors = path / "rank_00000.safetensors"
    shutil.move(tensors, tmp_path / "elsewhere")

    tensors.symlink_to(tmp_path / "elsewhere")
    assert "outside the folder" in refused(*commands(strangers)[1])
    tensors.unlink()
    tensors.mkdir()
    assert "not a regular file" in refused(*commands(strangers)[1])
    tensors.rmdir()
    os.mkfifo(tensors)
    assert "not a regular file" in refused(*commands(strangers)[1])
    assert "not a regular file" in refused(*commands(strangers)[0])


RUN_CONFIGS = {
    "a list": "[]",
    "null": "null",
    "deep": "[" * 5000 + "]" * 5000,
    "empty": "",
    "deep objects": '{"model":' * 5000 + "1" + "}" * 5000,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "model is a list": '{"model": []}',
    "a nested value": '{"model": {"width": [[[[1]]]]}}',
}


@pytest.mark.parametrize("text", tiered(RUN_CONFIGS.values()), ids=RUN_CONFIGS)
def test_the_config_in_a_run_is_checked(strangers, refused, text):
    (strangers / "run" / "config.json").write_text(text)
    assert "config.json" in refused(*commands(strangers)[0])


def test_a_pipe_in_place_of_the_config(strangers, refused):
    (strangers / "run" / "config.json").unlink()
    os.mkfifo(strangers / "run" / "config.json")
    refused(*commands(strangers)[0])


def test_the_config_is_not_written_through_a_link(strangers, capsys, monkeypatch, tmp_path):
    """`config.json -> ~/.bashrc` in a run that a stranger has packed."""
    target, link = tmp_path / "bashrc", strangers / "run" / "config.json"
    shutil.move(link, target)
    link.symlink_to(target)
    before = target.read_bytes()
    assert minitron(capsys, monkeypatch, *commands(strangers)[0])[0] == 0
    assert target.read_bytes() == before and not link.is_symlink()


def test_random_bytes_in_json_are_one_line(strangers, refused):
    """What no list above has: 60 files with one to three bytes changed."""
    path = strangers / "run/checkpoints/step_00000004"
    whole, generator = (path / TABLE).read_bytes(), torch.Generator().manual_seed(0)
    for _ in range(60):
        content = bytearray(whole)
        for place in torch.randint(len(content), (3,), generator=generator).tolist():
            content[place] = b'{}[]",:0-9e.n'[place % 13]
        (path / TABLE).write_bytes(content)
        with contextlib.suppress(OSError, ValueError):
            read_table(path)


# Renamed folders


def save(folder: Path, step: int, keep: int = 3) -> Path:
    boxes = {"weights": Chunks.full(torch.full((8,), float(step)))}
    return checkpoint.save(folder, step, boxes, {"step": step}, keep)


def test_a_renamed_folder_is_not_believed(tmp_path, capsys):
    for step in (20, 30):
        save(tmp_path, step)
    (tmp_path / "step_00000020").rename(tmp_path / "step_00000040")
    assert checkpoint.newest_good(tmp_path).name == "step_00000030"
    told = capsys.readouterr().err
    assert "step_00000040: damaged (renamed: it holds step 20; call it step_00000020" in told


def test_a_renamed_folder_does_not_take_the_place_of_a_new_one(tmp_path):
    """With one checkpoint kept, the one just written was deleted for it."""
    save(tmp_path, 10)
    (tmp_path / "step_00000010").rename(tmp_path / "step_99999999")
    for step in (20, 30):
        save(tmp_path, step, keep=1)
    assert checkpoint.newest_good(tmp_path).name == "step_00000030"
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "step_00000030",
        "step_99999999",
    ]


def test_steps_are_ordered_by_number(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step_100000000"]
    (tmp_path / "step_²²²²²²²²").mkdir()  # digits, for Python, and no number
    assert checkpoint.newest_good(tmp_path).name == "step_100000000"


def test_what_is_set_aside_is_never_overwritten(tmp_path):
    good = save(tmp_path, 1)
    for content in "first", "second":
        (save(tmp_path, 2) / "note").write_text(content)
        checkpoint.set_aside(tmp_path, good)
    kept = {path.name: (path / "note").read_text() for path in tmp_path.glob("*.damaged*")}
    assert kept == {"step_00000002.damaged": "first", "step_00000002.damaged2": "second"}


# Weights of others


def edit_config(**changes) -> Callable:
    return lambda folder: edit(folder / "config.json", lambda table: table.update(changes))


def config_is(text: str) -> Callable:
    return lambda folder: (folder / "config.json").write_text(text)


def cast(dtype: torch.dtype) -> Callable:
    def act(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name: value.to(dtype) for name, value in tensors.items()}, folder / "model.safetensors"
        )

    return act


def pipe(name: str) -> Callable:
    def act(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return act


def header_of(length: int) -> Callable:
    def act(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")

    return act


CONFIGS = {
    "a list": config_is("[]"),
    "null": config_is("null"),
    "empty": config_is(""),
    "a string": config_is('"llama"'),
    "deep": config_is("[" * 5000 + "]" * 5000),
    "deep objects": config_is('{"a":' * 5000 + "1" + "}" * 5000),
    "5,000 digits": config_is('{"hidden_size": ' + "9" * 5000 + "}"),
    "a key twice": config_is('{"model_type": "llama", "model_type": "gpt2"}'),
    "a kind that is a list": edit_config(model_type=["llama"]),
    "a kind that is a table": edit_config(model_type={}),
    "strings": edit_config(hidden_size="32"),
    "a list of sizes": edit_config(hidden_size=[32]),
    "null sizes": edit_config(hidden_size=None),
    "true": edit_config(num_hidden_layers=True),
    "floats": edit_config(num_hidden_layers=2.0),
    "zero": edit_config(vocab_size=0),
    "negative": edit_config(intermediate_size=-48),
    "NaN": edit_config(rms_norm_eps=float("nan")),
    "inf": edit_config(rms_norm_eps=float("inf")),
    "eps": edit_config(rms_norm_eps="1e-5"),
    "tied": edit_config(tie_word_embeddings="no"),
    "wide": edit_config(hidden_size=10**9),
    "wider": edit_config(hidden_size=2**62),
    "layers": edit_config(num_hidden_layers=10**6),
    "more layers": edit_config(num_hidden_layers=10**12),
    "words": edit_config(vocab_size=10**9),
    "feed-forward": edit_config(intermediate_size=2**23),
    "width": edit_config(hidden_size=2**20),
    "heads": edit_config(num_attention_heads=2**24),
    "theta": edit_config(rope_theta="x", rope_parameters=None),
    "rope": edit_config(rope_parameters=[1]),
    "head": edit_config(head_dim="16"),
    "factor": edit_config(
        rope_parameters={
            "rope_type": "llama3",
            "factor": "x",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    ),
    "a pipe": pipe("config.json"),
    "tensors are a pipe": pipe("model.safetensors"),
    "tensors are a folder": lambda folder: [
        (folder / "model.safetensors").unlink(),
        (folder / "model.safetensors").mkdir(),
    ],
    "integers": cast(torch.int32),
    "8 bits": cast(torch.float8_e4m3fn),
    "scalars": lambda folder: save_file(
        {name: torch.ones(()) for name in load_file(folder / "model.safetensors")},
        folder / "model.safetensors",
    ),
    "a header of 2^63 bytes": header_of(2**63),
    "a header of a gigabyte": header_of(2**30),
    "cut short": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "no head": lambda folder: save_file(
        {
            name: value
            for name, value in load_file(folder / "model.safetensors").items()
            if name != "lm_head.weight"
        },
        folder / "model.safetensors",
    ),
}


@pytest.mark.parametrize("harm", tiered(CONFIGS))
def test_what_weights_state_is_checked(strangers, refused, harm):
    CONFIGS[harm](strangers / "model")
    told = refused(*start_from(strangers))
    assert not (strangers / "new").exists()
    if harm == "no head":
        assert "set --model.tied-embedding" in told and "fetch" not in told


def with_index(folder: Path, files) -> None:
    """The model in two files and an index that says `files(name)` of each tensor."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    write_json(
        folder / "model.safetensors.index.json",
        {"weight_map": {name: files(name) for name in tensors}},
    )


PLACES = {
    "up": "../secret.safetensors",
    "absolute": "/etc/passwd",
    "above": "..",
    "here": ".",
    "nothing": "",
    "null": None,
    "a number": 7,
    "a list": ["first.safetensors"],
    "a folder": "folder",
    "a pipe": "pipe",
    "a link": "link.safetensors",
    "a null byte": "a\0b",
    "a link to a folder": "link/secret.safetensors",
    "nowhere": "nowhere.safetensors",
    "5,000 letters": "a" * 5000,
    "a device": "device",
}


@pytest.mark.parametrize("place", tiered(PLACES))
def test_an_index_cannot_lead_out_of_its_folder(strangers, refused, place):
    folder = strangers / "model"
    shutil.copy(folder / "model.safetensors", strangers / "secret.safetensors")
    with_index(folder, lambda name: PLACES[place])
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link.safetensors").symlink_to(strangers / "secret.safetensors")
    (folder / "link").symlink_to(strangers)
    (folder / "device").symlink_to("/dev/zero")
    refused(*start_from(strangers))


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"weight_map": []},
        {"weight_map": None},
        {},
        {"weight_map": {}},
        {"weight_map": {"lm_head.weight": "first.safetensors"}},
    ],
    ids=str,
)
def test_an_index_may_be_anything(strangers, refused, content):
    with_index(strangers / "model", lambda name: "first.safetensors")
    (strangers / "model/model.safetensors.index.json").write_text(json.dumps(content))
    refused(*start_from(strangers))


def test_an_index_of_another_model_is_one_line(strangers, refused):
    """It names tensors that the file does not hold."""
    with_index(strangers / "model", lambda name: "first.safetensors")
    save_file({"x": torch.ones(1)}, strangers / "model/first.safetensors")
    assert "fetch the model again" in refused(*start_from(strangers))


def test_the_cache_of_hugging_face_may_link(strangers, capsys, monkeypatch):
    """`snapshots/REVISION/model.safetensors -> ../../blobs/HASH`, and nowhere else."""
    cache = strangers / "models--someone--something"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "0123abc"
    shutil.copytree(strangers / "model", snapshot)
    for file in list(snapshot.iterdir()):
        shutil.move(file, cache / "blobs" / file.name)
        file.symlink_to(f"../../blobs/{file.name}")
    words = start_from(strangers)
    words[words.index(strangers / "model")] = snapshot
    assert minitron(capsys, monkeypatch, *words)[0] == 0
    (snapshot / "other").symlink_to(strangers / "run" / "config.json")
    with pytest.raises(ValueError, match="outside the folder"):
        file_in(snapshot, "other")


# The data and the TOML file


def of_no_kind(kind: str, path: Path) -> None:
    """Something in place of a file that cannot be read as one, or never ends."""
    path.unlink(missing_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")


@pytest.fixture
def words_with_own_data(strangers) -> list:
    """Train on a copy of the data in `strangers`, by a TOML file of the user's."""
    shutil.copytree(json.loads((strangers / "data.json").read_text()), strangers / "data")
    (strangers / "data.json").write_text(json.dumps(str(strangers / "data")))
    return start_from(strangers)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes among files")
@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device"])
@pytest.mark.parametrize(
    "name",
    tiered(
        [
            "mine.toml",
            "data/corpus.json",
            "data/train_000.bin",
            "data/val_000.bin",
            "data/tokenizer.json",
        ]
    ),
)
def test_what_is_no_regular_file_is_called_so(strangers, words_with_own_data, refused, name, kind):
    assert (strangers / name).is_file()
    of_no_kind(kind, strangers / name)
    assert f"{strangers / name}: " in (told := refused(*words_with_own_data))
    assert "not a regular file" in told


@pytest.mark.parametrize(
    "name", ["train_000.bin", "corpus.json", "tokenizer.json", "contents.json"]
)
def test_nothing_in_a_data_folder_is_executed(
    strangers, words_with_own_data, capsys, monkeypatch, tmp_path, name
):
    payload = Payload(tmp_path / "executed")
    monkeypatch.setattr("minitron.corpus.contents.SETTLED_NS", 0)
    (strangers / "data" / name).write_bytes(pickle.dumps(payload))
    code, lines = minitron(capsys, monkeypatch, *words_with_own_data)
    if name == "contents.json":  # a memory, which is made anew
        assert code == 0, lines
        assert "train_000.bin" in read_json(strangers / "data" / name)
    else:
        assert code == 2 and lines[-1].startswith(f"minitron: {strangers / 'data' / name}: "), lines
    assert not payload.marker.exists()


def test_json_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("minitron.system.files.MOST_BYTES", 100)
    (tmp_path / "large.json").write_text(json.dumps({"a": "b" * 100}))
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        read_json(tmp_path / "large.json")


def test_a_full_disk_leaves_the_json_that_was_there(tmp_path, monkeypatch):
    write_json(tmp_path / "a.json", {"a": 1})

    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(tmp_path / "a.json", {"a": 2})
    monkeypatch.undo()
    assert read_json(tmp_path / "a.json") == {"a": 1}
    write_json(tmp_path / "a.json", {"a": 3})
    assert read_json(tmp_path / "a.json") == {"a": 3}
