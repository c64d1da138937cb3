"""Tables wider than the terminal: which columns stand in which block."""

import doctest

import pytest

from moesaic.cli import listings
from moesaic.common import fold
from moesaic.common.fold import column_blocks
from moesaic.common.intervals import Interval
from moesaic.comparison.tables import Heading, Row, Table, render
from moesaic.families.support import support


def test_examples():
    assert doctest.testmod(fold).failed == 0


@pytest.mark.parametrize("room", [1, 12, 20, 33, 80])
def test_every_column_comes_once_and_no_block_is_too_wide(room):
    widths = [3, 9, 4, 4, 20, 1, 7]
    blocks = column_blocks(8, widths, room, gap=2)
    assert [place for block in blocks for place in block] == list(range(len(widths)))
    for block in blocks:
        assert len(block) == 1 or 8 + sum(2 + widths[place] for place in block) <= room
    assert column_blocks(8, [], room, gap=2) == [range(0)]


def test_a_wide_comparison_is_folded_on_a_terminal_only():
    headings = tuple(Heading(title=f"task number {place}", best="high") for place in range(9))
    cells = [tuple(Interval(value=0.1 * place + row, low=0, high=9) for place in range(9)) for row in (0, 1)]
    rows = (Row(name="one", cells=cells[0]), Row(name="two", cells=cells[1]))
    table = Table(title="Scores", headings=headings, rows=rows)
    whole, folded = render([table], "table"), render([table], "table", room=80)
    assert len(whole) == 4
    assert max(map(len, folded)) <= 80
    blocks = [folded[start : start + 3] for start in range(1, len(folded), 3)]
    assert len(blocks) > 1
    for number, name in ((1, "one"), (2, "two")):
        words = [word for block in blocks for word in block[number].removeprefix(name).split()]
        assert words == whole[number + 1].removeprefix(name).split()


def test_families_fit_a_terminal(monkeypatch):
    monkeypatch.setattr(listings, "room", lambda: 80)
    table = [line for line in listings._table(support()) if not line.startswith("[")]
    assert max(map(len, table)) <= 80
    assert sum(line.startswith("mixtral ") for line in table) > 1
