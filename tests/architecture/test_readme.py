"""The commands, tree, table and pictures of README and docs agree with what is there."""

import ast
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from minitron import cli
from minitron.train import read_options
from teaching import exercises
from tests.tiers import exhaustive
from tools.readme_figures import PATH, SEAMS, bytes_by_chapter

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
MAP = (REPOSITORY / "docs" / "map.md").read_text()
TRAINING = (REPOSITORY / "docs" / "training.md").read_text()
PAGES = README + TRAINING
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", PAGES, flags=re.DOTALL | re.MULTILINE)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"(make|minitron|torchrun|pip) ", line)
]
COMMANDS += re.findall(r"`((?:make|minitron) [^`]+)`", PAGES)


def test_there_are_commands_to_check():
    assert "make test" in COMMANDS and "make train" in COMMANDS
    assert len(COMMANDS) > 12


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_knows_its_targets(command):
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in command.split()[1:]:
        assert re.search(rf"^{target}:.*## ", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith(("minitron", "torchrun"))])
def test_commands_are_understood(command, monkeypatch):
    """Each command line is parsed by the real parser, down to the call that would do the work."""
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(re.sub("^torchrun .*-m minitron.train", "minitron train", command))[1:]
    assert words[0] in cli.COMMANDS
    if words[0] == "train" and "--help" not in words and "--run-dir" not in words:
        options = read_options(words[1:])
        assert options.file and options.file.is_file()
    if words[0] == "data":
        corpus = cli.read_corpus(words[1:])
        assert callable(corpus.make)
    if words[0] in ("check", "hint", "reset", "solution"):
        assert exercises.find(words[1]).id == words[1]


@pytest.fixture
def hello(tmp_path) -> Path:
    script = tmp_path / "hello.py"
    script.write_text(next(block for block in BLOCKS if "run(hello, 4)" in block))
    return script


HELLO = [f"[rank {rank}] rank {rank} of 4" for rank in range(4)]


def test_the_example_of_many_ranks_runs(hello, capsys):
    runpy.run_path(str(hello), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == HELLO


@exhaustive
def test_the_example_of_many_ranks_is_a_script(hello):
    done = subprocess.run([sys.executable, hello], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == HELLO, done.stderr


def test_the_test_command_is_what_ci_runs():
    ci = (REPOSITORY / ".ci" / "run").read_text().splitlines()
    assert any(line.split("#")[0].strip() == "make test" for line in ci)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/map.md", "docs/long_runs.md", "docs/training.md"]
)
def test_links_and_pictures_exist(page):
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (REPOSITORY / page).read_text())
    assert links
    for link in links:
        assert (REPOSITORY / page).parent.joinpath(link).exists(), link


def test_it_stays_short():
    assert len(README.splitlines()) <= 180


def test_the_figure_is_of_the_config_that_make_train_runs():
    """The figure says in a comment which run it shows: `make figure` draws it anew."""
    facts = json.loads(Image.open(REPOSITORY / "docs" / "story_loss.png").text["Comment"])
    config = tomllib.loads((REPOSITORY / "configs" / "stories.toml").read_text())
    shown = {table: {key: facts[table][key] for key in config[table]} for table in config}
    assert shown == config
    steps, every = config["train"]["steps"], config["train"]["eval_every"]
    assert facts["evaluated"] == [*range(every, steps, every), steps]


def test_the_bytes_of_the_course_are_the_planner_s():
    """`make figure` draws them anew."""
    drawn = json.loads(Image.open(REPOSITORY / "docs" / "course.png").text["Comment"])
    assert drawn == bytes_by_chapter()
    totals = [round(sum(kinds.values()) / 1e9) for kinds in drawn.values()]
    [alt] = re.findall(r"!\[([^\]]*)\]\(docs/course.png\)", README)
    assert f"{totals[0]} GB" in alt and f"{min(totals)} to {totals[-1]} GB" in alt


def test_the_picture_of_the_system_names_what_is_there():
    for name in [*PATH, *(f"parallel/{seam}" for seam in SEAMS)]:
        assert (REPOSITORY / "minitron" / name).exists(), name


def test_pictures_say_what_they_show():
    for alt in re.findall(r"!\[([^\]]*)\]", README):
        assert len(alt) > 40


def test_the_tree_names_folders_that_are_there():
    tree = next(block for block in BLOCKS if "\nminitron/ " in block)
    for line in tree.splitlines():
        assert (REPOSITORY / line.split()[0]).is_dir(), line


def test_the_map_names_every_module_and_nothing_else():
    listed = re.findall(r"^\| \[`[^`]*`\]\(\.\./([^)]*)\) \| \S", MAP, flags=re.MULTILINE)
    modules = {
        str(path.relative_to(REPOSITORY))
        for package in ("minitron", "teaching")
        for path in (REPOSITORY / package).rglob("*.py")
        if has_code(path)
    }
    by_chapter = ("teaching/graders/", "teaching/lab/", "teaching/slides/")
    described = {module for module in modules if not module.startswith(by_chapter)}
    assert set(listed) == described | set(by_chapter)
    assert len(listed) == len(set(listed))


def has_code(path: Path) -> bool:
    """Whether a module holds more than a docstring and imports."""
    statements = ast.parse(path.read_text()).body
    return (
        any(isinstance(s, ast.FunctionDef | ast.ClassDef) for s in statements)
        or path.name != "__init__.py"
    )


def test_the_layers_are_those_that_are_enforced():
    contract = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        [module.strip() for module in re.split("[|:]", layer) if "(" not in module]
        for layer in contract["contracts"][0]["layers"]
    ]
    drawn = re.search(r"^```\n(cli .*?)^```", MAP, flags=re.DOTALL | re.MULTILINE)[1]
    shown = re.sub(r" *\n +\| ", " | ", "\n".join(line[:31] for line in drawn.splitlines()))
    assert [
        [module.strip() for module in re.split("[|:]", line)] for line in shown.splitlines()
    ] == layers


def test_the_table_has_a_row_for_every_chapter():
    chapters = sorted(path.name for path in (REPOSITORY / "chapters").glob("ch*.ipynb"))
    rows = re.findall(
        r"^\| \[\d+ .*?\]\(chapters/(.*?)\).*\[(\d+\.\d+) to (\d+\.\d+)\]"
        r"\(exercises/(.*?)\)",
        README,
        flags=re.MULTILINE,
    )
    assert [row[0] for row in rows] == chapters
    for notebook, first, last, file in rows:
        ids = [exercise.id for exercise in exercises.select([first.split(".")[0]])]
        assert (first, last) == (ids[0], ids[-1])
        assert file == notebook.replace(".ipynb", ".py")
        assert (REPOSITORY / "exercises" / file).exists()
