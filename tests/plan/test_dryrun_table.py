"""Tables of dry runs fit a terminal, however many columns they have."""

from minitron.plan.dryrun_table import WIDTH, aligned


def test_columns_beyond_the_width_go_below_with_the_first_one_again():
    columns = [f"reduce_scatter axis{index}" for index in range(9)]
    rows = [["rank", *columns], ["1,024", *(f"{index}.25" for index in range(9))]]
    text = aligned(rows)
    assert max(map(len, text.splitlines())) <= WIDTH
    tables = [table.splitlines() for table in text.split("\n\n")]
    assert len(tables) == 3
    assert all(head.split()[0] == "rank" and line.split()[0] == "1,024" for head, line in tables)
    assert [cell for _, line in tables for cell in line.split()[1:]] == rows[1][1:]


def test_a_table_that_fits_is_one():
    assert aligned([["rank", "GB"], ["0", "12.5"]]) == "rank    GB\n   0  12.5"


def test_long_words_at_the_end_go_on_in_the_next_line():
    text = aligned([["GB", "what"], ["12.5", "made by " * 20]], left=1)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.split().count("made") == 20
