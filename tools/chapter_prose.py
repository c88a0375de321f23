"""What a chapter's prose claims, against what stands behind it.

    python tools/chapter_prose.py ch06      list what nothing vouches for

A number in prose must stand in an output that is the same on every run (of a cell tagged
"nbval-check-output"), in the chapter's code, or beside a citation. A name in backticks must be one
of the chapter's code, of the package, of PyTorch or Python, a file, a command, or cited.
"""

import ast
import builtins
import importlib
import keyword
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, Python looks in tools/ alone

from tools import chapter_links  # noqa: E402
from tools.build_chapters import chapter_sources, notebook_path  # noqa: E402

NUMBER = re.compile(
    r"(?<![\w.,^/-])(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w]*\d)"
)
"""In prose: 3,072, 16.5, 1e-12; not the 3 of "ch03", of "2x3" or of "v1.2.3"."""
IN_OUTPUT = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?(?:e[+-]?\d+)?")
REFERENCE = re.compile(
    r"\b(?:chapters?|exercises?|sections?|figures?|tables?|equations?|steps?|cells?|ranks?|stages?"
    r"|levels?|versions?|claims?|lines?|parts?|blocks?|layers?|GPUs?|nodes?|micro-batch(?:es)?"
    r"|Llama|GPT-?|ZeRO-?|PyTorch|Python|NCCL|CUDA|FSDP|float|bfloat|fp|bf)"
    r"\s*\d+(?:\.\d+)*(?:(?:,| and| to| or|, and)\s+\d+(?:\.\d+)*)*",
    re.IGNORECASE,
)
"""A number that names something rather than counts it."""
CITED = re.compile(
    r"\]\(https?://|\bet al\.|\b(?:19|20)\d\d[a-z]?\b|\bdatasheet\b"
    r"|\bspecification\b|\bissues? \d|\bpull requests? \d|\w/[\w-]+#\d"
)
"""A source in the same paragraph: a paper, a datasheet, somebody's issue or pull request."""
PROGRAMS = {"nvidia-smi", "nvcc", "nsys", "torchrun", "srun", "sbatch", "python", "pip"}
SMALL = 12
"""A whole number up to this, without a unit, is a count that the reader can see."""
UNIT = re.compile(
    r"\s*(?:%|percent\b|times\b|[kMGT]i?B\b|bytes?\b|bits?\b|[mnu]?s\b"
    r"|seconds?\b|minutes?\b|hours?\b|days?\b|years?\b|TFLOP|GFLOP|FLOPs?\b|tokens?\b|parameters?\b)"
)


def main() -> int:
    names = sys.argv[1:]
    problems = 0
    for source in chapter_sources(names):
        notebook = nbformat.read(notebook_path(source), as_version=4)
        for problem in [*unvouched_numbers(notebook), *unknown_names(notebook)]:
            print(f"{source.stem}: {problem}")
            problems += 1
    return problems > 0


# Numbers


def unvouched_numbers(notebook: NotebookNode) -> list[str]:
    """Return "cell N: number in its sentence" for each number that nothing vouches for."""
    known = vouched(notebook)
    problems = []
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        for paragraph in paragraphs(cell.source):
            if CITED.search(paragraph):
                continue
            text = plain(paragraph)
            for match in NUMBER.finditer(text):
                if not is_vouched(match, text, known):
                    around = text[max(0, match.start() - 40) : match.end() + 30].replace("\n", " ")
                    problems.append(f"cell {position}: {match[1]} in ...{around}...")
    return problems


def paragraphs(markdown: str) -> list[str]:
    """Return a cell's paragraphs; a table is one, with the paragraph before it."""
    blocks = [block for block in re.split(r"\n\s*\n", markdown) if block.strip()]
    joined: list[str] = []
    for block in blocks:
        if block.lstrip().startswith("|") and joined:
            joined[-1] += "\n" + block
        else:
            joined.append(block)
    return joined


def plain(markdown: str) -> str:
    """Return a paragraph without headings' numbers, code, tags, addresses and references."""
    text = re.sub(r"^#+ (?:\d+\.)?|^\s*\d+\.\s", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"^\*\*\d+ minutes.*|\(\d+ minutes\)", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`|<[^>]*>|\]\([^)]*\)", " ", text)
    text = text.replace(r"\,", "").replace("{,}", ",").replace(r"\%", "%")
    return REFERENCE.sub(" ", text)


def vouched(notebook: NotebookNode) -> list[tuple[float, str]]:
    """Return the numbers of deterministic outputs and of code, as value and as written."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts.append(re.sub(r"(?<=\d)_(?=\d)", "", cell.source))  # 12_288
            if "nbval-check-output" in cell.metadata.get("tags", []):
                texts += list(outputs(cell))
    return [(value_of(number), number) for text in texts for number in IN_OUTPUT.findall(text)]


def outputs(cell: NotebookNode) -> Iterator[str]:
    """Yield the texts that a code cell printed."""
    for output in cell.outputs:
        yield "".join(output.get("text", output.get("data", {}).get("text/plain", "")))


def value_of(number: str) -> float:
    return float(number.replace(",", ""))


def is_vouched(match: re.Match, text: str, known: list[tuple[float, str]]) -> bool:
    """Return whether a number is small, or is a known one rounded or in another unit."""
    number = match[1]
    value = value_of(number)
    has_unit = UNIT.match(text, match.end()) is not None
    if value == int(value) and value <= SMALL and "." not in number and not has_unit:
        return True
    if value == int(value) and int(value) & (int(value) - 1) == 0:
        return True  # a power of two
    half = 0.5 * 10.0 ** -len(number.partition(".")[2].partition("e")[0]) * (1 + 1e-9)
    if "e" in number:
        half = value * 1e-9
    return any(
        abs(each * scale - value) <= half
        for each, _ in known
        for scale in (1, 100, 1e3, 1e-3, 1e6, 1e-6, 1e9, 1e-9, 1e-12)
    )


# Names


def unknown_names(notebook: NotebookNode) -> list[str]:
    """Return "cell N: `name`" for each name in backticks that does not exist."""
    own = "\n".join(
        cell.source + "\n" + "\n".join(outputs(cell))
        for cell in notebook.cells
        if cell.cell_type == "code"
    )
    problems = []
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type != "markdown":
            continue
        text = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
        for paragraph in paragraphs(text):
            if not CITED.search(paragraph):  # with a citation, it may be a name of the cited code
                problems += [
                    f"cell {position}: `{name}`"
                    for name in re.findall(r"`([^`\n]+)`", paragraph)
                    if name not in own and not exists(name)
                ]
    return problems


def exists(name: str) -> bool:
    """Return whether a name in backticks is a file, a command, or made of names that exist."""
    if (ROOT / name).exists() or (ROOT / "minitron" / name).exists():
        return True
    first, *rest = name.split()
    if first in PROGRAMS and not rest:
        return True
    if first == "python" and rest and rest[0] == "-m":
        return (ROOT / rest[1].replace(".", "/")).with_suffix(".py").exists()
    if first == "make":
        makefile = (ROOT / "Makefile").read_text("utf-8")
        return all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in rest)
    if first in ("minitron", "torchrun"):
        return all(is_option(word) for word in rest if word.startswith("--"))
    if first.startswith("--"):
        return is_option(first)
    if re.fullmatch(r"[A-Z]+(_[A-Z]+)+(=.*)?", name):
        return True  # an environment variable or a constant of a library
    if re.fullmatch(r"[\w-]+\.[\w-]+", name) and name.split(".")[1].replace("-", "_") in defined():
        return True  # a field of a config
    return all(is_defined(chain) for chain in re.findall(r"[A-Za-z_][\w.]*", name))


def is_option(word: str) -> bool:
    """Return whether --axis.field or --field=value is one of ours, or of torchrun."""
    name = word.lstrip("-").split("=")[0].replace("-", "_").split(".")[-1]
    return name in defined() or f"--{name.replace('_', '-')}" in torchrun_options()


@cache
def torchrun_options() -> frozenset[str]:
    """Return the options that torchrun knows."""
    from torch.distributed.run import get_args_parser

    return frozenset(
        option for action in get_args_parser()._actions for option in action.option_strings
    )


def is_defined(chain: str) -> bool:
    """Return whether a dotted name is known here, or resolves in PyTorch or Python."""
    parts = chain.strip(".").split(".")
    if parts[0] in ("minitron", "teaching") and len(parts) > 1:
        try:
            return bool(chapter_links.code(".".join(parts)))
        except chapter_links.LinkError:
            return False
    if all(part in defined() or hasattr(builtins, part) for part in parts):
        return True
    short = {"F": "torch.nn.functional", "nn": "torch.nn", "dist": "torch.distributed"}
    full = ".".join([short.get(parts[0], parts[0]), *parts[1:]])
    is_method = len(parts) > 1 and resolves(parts[-1])
    return keyword.iskeyword(chain) or is_method or resolves(full)


@cache
def resolves(name: str) -> bool:
    """Return whether `name` is a module or a member of one, of PyTorch or of Python."""
    candidates = [
        name,
        f"torch.{name}",
        f"torch.Tensor.{name}",
        f"torch.nn.{name}",
        f"torch.nn.Module.{name}",
        f"torch.distributed.{name}",
        f"torch.nn.functional.{name}",
    ]
    return any(_reach(candidate.split(".")) for candidate in candidates)


def _reach(parts: list[str]) -> bool:
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except (ImportError, ValueError):
            continue
        for part in parts[cut:]:
            if not hasattr(value, part):
                break
            value = getattr(value, part)
        else:
            return True
    return False


@cache
def defined() -> frozenset[str]:
    """Return every name that the package, the teaching tools or the exercises define."""
    names = {"minitron", "teaching", "torch", "self"}
    for folder in ("minitron", "teaching", "solutions", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            names |= {*path.relative_to(ROOT).with_suffix("").parts, path.name}
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                match node:
                    case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                        names.add(name)
                    case (
                        ast.Name(id=name, ctx=ast.Store())
                        | ast.Attribute(attr=name, ctx=ast.Store())
                    ):
                        names.add(name)
    return frozenset(names)


if __name__ == "__main__":
    sys.exit(main())
