"""The `minitron` command: train a model, make data, work through the course.

Every command is a small dataclass, so that its fields write `minitron COMMAND --help`. Commands
import what they need when they run: `minitron hint` should not wait for torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Annotated, Literal

import tyro

from minitron import __version__, config
from minitron.config import command_line
from minitron.config import file as config_file
from minitron.system import disk

USAGE = """usage: minitron COMMAND [...]

  train     train a model                   minitron train configs/stories.toml
  data      make or download a corpus       minitron data stories | text | python | fineweb
  export    write weights for transformers  minitron export runs/stories my-model
  plan      compare layouts before renting  minitron plan configs/llama-70b.toml --gpus 512
  dryrun    run a step without a GPU        minitron dryrun configs/gpt3-175b.toml --gpus 1024
  prove     compare N ranks with 1 process  minitron prove --ranks 2
  doctor    check this machine
  check     grade exercises                 minitron check 1.2     (a chapter: minitron check 1)
  hint      show the next hint              minitron hint 1.2
  status    list the solved exercises
  reset     restore an exercise's stub      minitron reset 1.2
  solution  show our answer                 minitron solution 1.2     (once yours passes)

`minitron COMMAND --help` lists the options; `minitron --version` prints the version."""

Positional = tyro.conf.Positional


def train(args: list[str]) -> int:
    """Train a model."""
    from minitron.train import run_train

    return run_train(args)


@dataclass(frozen=True)
class Stories:
    """Write a corpus of little stories from a seeded grammar, in seconds and without a network."""

    out: Path = Path("data/stories")
    """Folder to write."""
    num_tokens: int = 4_000_000
    """Training tokens."""
    seed: int = 0
    """Seed of the random choices in the stories."""

    def make(self) -> dict:
        from minitron.corpus.stories import write_stories

        config.require_positive("data stories", self, "num_tokens")
        config.require(self.seed >= 0, f"data stories.seed = {self.seed}: must be 0 or more")
        return write_stories(self.out, self.num_tokens, self.seed)


@dataclass(frozen=True)
class Text:
    """Turn text files into a corpus, with a byte-pair vocabulary of their own."""

    paths: Positional[tuple[Path, ...]]
    """Files, and folders to search."""
    out: Path = Path("data/text")
    """Folder to write."""
    vocab_size: int = 4096
    """Size of the vocabulary, V: 257 to 65,535."""
    pattern: str = "*.txt"
    """Which files of a folder to read."""

    def make(self) -> dict:
        from minitron.corpus.text import write_text

        config.require(len(self.paths) > 0, "data text: no path given", "name files or folders")
        return write_text(list(self.paths), self.out, self.vocab_size, pattern=self.pattern)


@dataclass(frozen=True)
class Python:
    """Turn the source of Python's standard library into a corpus: real text, no download."""

    out: Path = Path("data/python")
    """Folder to write."""
    vocab_size: int = 4096
    """Size of the vocabulary, V: 257 to 65,535."""

    def make(self) -> dict:
        from minitron.corpus.text import write_python

        return write_python(self.out, self.vocab_size)


@dataclass(frozen=True)
class FineWeb:
    """Download FineWeb, already tokenized for GPT-2, in shards of 100 M tokens each."""

    out: Path = Path("data/fineweb")
    """Folder to write; a second call continues an interrupted one."""
    num_shards: int = 1
    """Training shards to download, 1 to 103, of 200 MB each."""

    def make(self) -> dict:
        from minitron.corpus.fineweb import download_fineweb

        return download_fineweb(self.out, self.num_shards)


Corpus = (
    Annotated[Stories, tyro.conf.subcommand("stories")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Python, tyro.conf.subcommand("python")]
    | Annotated[FineWeb, tyro.conf.subcommand("fineweb")]
)


def read_corpus(args: list[str]) -> Stories | Text | Python | FineWeb:
    """Read which corpus the words ask for."""
    return command_line.parse(Corpus, args, "minitron data")


def data(args: list[str]) -> int:
    """Make or fetch a corpus."""
    corpus = read_corpus(args)
    with disk.writing(corpus.out, "make room, or choose another folder with --out"):
        info = corpus.make()
    facts = ", ".join(f"{key} {value:,}" for key, value in info.items() if type(value) is int)
    print(f"{corpus.out}: {facts}")
    return 0


@dataclass(frozen=True)
class Export:
    """Write a run's newest checkpoint in Hugging Face's format."""

    run: Positional[Path]
    """A run's folder, such as runs/stories."""
    folder: Positional[Path]
    """Folder to write: config.json, model.safetensors and the tokenizer."""
    dtype: Literal["as-trained", "float32", "bfloat16", "float16"] = "as-trained"
    """Dtype of the exported weights; as-trained: that of the parameters during training."""


def export(args: list[str]) -> int:
    """Write a run's newest checkpoint in Hugging Face's format."""
    from minitron.hugging_face.folder import export as write

    options = command_line.parse(Export, args, "minitron export")
    write(options.run, options.folder, options.dtype)
    has_tokenizer = (options.folder / "tokenizer.json").is_file()
    print(
        f"{options.folder}: wrote the model{' and its' if has_tokenizer else ', but no'} tokenizer;"
        f" load it with transformers, or start a run with minitron train --weights {options.folder}"
    )
    return 0


def plan(args: list[str]) -> int:
    """Find the fastest layouts for a config on so many GPUs."""
    from minitron.plan.command import run_plan

    return run_plan(args)


def dryrun(args: list[str]) -> int:
    """Run a step of one rank of many, without a GPU."""
    from minitron.plan.dryrun_command import run_dry_run

    return run_dry_run(args)


def prove(args: list[str]) -> int:
    """Compare every technique on many ranks with one process."""
    from minitron.proof.command import run_prove

    return run_prove(args)


@dataclass(frozen=True)
class Exercises:
    """Grade exercises."""

    ids: Positional[tuple[str, ...]] = ()
    """Exercises such as 1.2, or chapters such as 1; none means all."""


@dataclass(frozen=True)
class Reset:
    """Restore an exercise's stub, or a chapter's; your file is kept in .minitron/backups."""

    id: Positional[str]
    """An exercise, such as 1.2, or a chapter, such as 1."""


@dataclass(frozen=True)
class Hint:
    """Show one more hint."""

    id: Positional[str]
    """An exercise, such as 1.2."""
    level: int | None = None
    """1: what to look at; 2: the algorithm in words; 3: almost the code. Default: the next one."""


@dataclass(frozen=True)
class Solution:
    """Show our answer, once yours passes."""

    id: Positional[str]
    """An exercise, such as 1.2."""
    give_up: bool = False
    """Show it even if yours does not pass."""


def require_no_words(args: list[str], command: Callable) -> None:
    """Raise ConfigError for words after a command that takes none; `--help` exits with 0."""
    name = command.__name__
    if {"-h", "--help"} & set(args):
        print(f"usage: minitron {name}\n\n{command.__doc__}")
        raise SystemExit(0)
    config.require(not args, f"{name}: takes no arguments, but got {' '.join(args)}")


def check(args: list[str]) -> int:
    """Grade exercises."""
    from teaching.check import run_check

    return run_check(list(command_line.parse(Exercises, args, "minitron check").ids))


def hint(args: list[str]) -> int:
    """Show one more hint."""
    from teaching.hints import run_hint

    options = command_line.parse(Hint, args, "minitron hint")
    return run_hint(options.id, options.level)


def status(args: list[str]) -> int:
    """List the exercises and which of them are solved."""
    from teaching.check import run_status

    require_no_words(args, status)
    return run_status()


def reset(args: list[str]) -> int:
    """Put an exercise's stub back, keeping a copy of what was there."""
    from teaching.reset import run_reset

    return run_reset(command_line.parse(Reset, args, "minitron reset").id)


def solution(args: list[str]) -> int:
    """Show our answer, once yours passes."""
    from teaching.check import run_solution

    options = command_line.parse(Solution, args, "minitron solution")
    return run_solution(options.id, options.give_up)


def doctor(args: list[str]) -> int:
    """Check whether this machine is ready for the course."""
    from teaching.doctor import run_doctor

    require_no_words(args, doctor)
    return run_doctor()


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    function.__name__: function
    for function in (
        train,
        data,
        export,
        plan,
        dryrun,
        prove,
        doctor,
        check,
        hint,
        status,
        reset,
        solution,
    )
}


def dispatch(args: list[str]) -> int:
    """Run the command that the first word names; returns its exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if args[0] == "--version":
        print(f"minitron {__version__}, torch {version('torch')}, Python {python_version()}")
        return 0
    config_file.require_known(args[:1], COMMANDS, "command line", what="command")
    return COMMANDS[args[0]](args[1:])


def main() -> None:
    """Run the console script."""
    command_line.run(dispatch)


if __name__ == "__main__":
    main()
