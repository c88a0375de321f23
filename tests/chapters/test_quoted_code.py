"""The code that slides, statements and hints name exists."""

import pytest

from tools import quoted_code
from tools.build_chapters import chapter_sources
from tools.quoted_code import code_of, quoted, statements, unknown, unknown_of_deck

CHAPTERS = [source.stem for source in chapter_sources([])]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_name_of_code_in_slides_statements_and_hints_exists(chapter):
    assert list(quoted_code.unknown_everywhere(chapter)) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            "Call `train_step` or loss.backward(), as accumulate_gradients and torch.compile do.",
            ["train_step", "loss.backward()", "accumulate_gradients", "torch.compile"],
        ),
        ("A word-like-this, 1.2, e.g. one; see [it](a_b.md) at https://example.org/c_d.", []),
    ],
)
def test_what_looks_like_code(text, names):
    assert quoted(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "Use segments_for_budget and torch.get_rng_state().",
        "A model.named_parameters() too, and `torch.compile`.",
        "my_total is a sum:\n\nmy_total = ...",
        "for each_row in rows: each_row.sum()",
        "Like this:\n\n    loss(my_rows).backward()\n\nwith my_rows of this rank.",
        "`its_own` is in the chapter.",
    ],
)
def test_a_name_with_something_behind_it_passes(text):
    assert unknown(text, "its_own = 1") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Use `segments_for_budgets`.", "segments_for_budgets"),
        ("Use segments_for_budgets.", "segments_for_budgets"),
        ("Then torch.get_rng_stats() returns it.", "torch.get_rng_stats()"),
        ("if my_total == 3: stop", "my_total"),
        ("With no_such_name and zero_grad, set x = 1.", "no_such_name"),
        ("For no_such_name in the loop", "no_such_name"),
        ("Call it with no_such_option=True.", "no_such_option"),
        ("Ask minitron.cost.computer.", "minitron.cost.computer"),
    ],
)
def test_a_name_with_nothing_behind_it_is_found(text, name):
    assert unknown(text, "") == [name]


def test_a_deck_s_code_blocks_pictures_and_formulas_are_not_prose():
    deck = "---\ntitle: no_such_title\n---\n"
    deck += "![w:100 no_such_picture](assets/a_b.png)\n$no_such_formula$\n@output no_such_output\n"
    deck += "```python\nour_own = 1\n```\n<!-- our_own is one -->"
    assert unknown_of_deck(deck, "") == []
    assert unknown_of_deck(f"{deck}\n\nBut no_such_name.", "") == ["no_such_name"]
    assert unknown_of_deck(f"{deck}\n\nTheir no_such_name (Dao et al. 2022).", "") == []


MODULE = '''"""Said by no_such_module."""
class Unit:
    """Said by no_such_class."""

    def gather_all(self, num_ranks):  # said by no_such_comment
        """Said by no_such_method."""
'''


def test_what_a_solution_says_vouches_for_nothing():
    assert "no_such" not in code_of(MODULE) and "gather_all" in code_of(MODULE)
    [statement] = statements(MODULE)
    assert unknown(statement, code_of(MODULE)) == ["no_such_class", "no_such_method"]


def test_the_tool_lists_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(quoted_code.sys, "argv", ["quoted_code.py", "ch01"])
    monkeypatch.setattr(quoted_code, "unknown_everywhere", lambda _: ["slides: no_such_name"])
    assert quoted_code.main() == 1
    assert "ch01_single_gpu: slides: no_such_name" in capsys.readouterr().out
