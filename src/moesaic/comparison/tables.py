"""A table of estimates, as text, Markdown, CSV and JSON. Torch-free."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal

from moesaic.common.fold import column_blocks
from moesaic.common.intervals import Interval
from moesaic.common.shown import html_table

Format = Literal["table", "md", "csv", "json"]


@dataclass(frozen=True, kw_only=True)
class Heading:
    """A column of a table."""

    title: str
    percent: bool = False
    signed: bool = False
    best: Literal["high", "low"] | None = None
    """Which of its values is the best one; None: none is marked."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a table."""

    name: str
    cells: tuple[Interval | str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Estimates with their names."""

    title: str
    headings: tuple[Heading, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> list[set[int]]:
        """For each column, the rows with its best value; none where fewer than two rows have one."""
        found = []
        for place, heading in enumerate(self.headings):
            cells = {number: row.cells[place] for number, row in enumerate(self.rows)}
            values = {number: cell.value for number, cell in cells.items() if isinstance(cell, Interval)}
            top = max(values.values(), default=0.0) if heading.best == "high" else min(values.values(), default=0.0)
            marked = heading.best is not None and len(values) > 1
            found.append({number for number, value in values.items() if marked and value == top})
        return found


def cell_text(cell: Interval | str | None, heading: Heading) -> str:
    """`61.2 ±1.4`, or `61.2 [59.0, 62.9]` where the interval is not symmetrical.

    >>> cell_text(Interval(value=0.612, low=0.598, high=0.626), Heading(title="x", percent=True))
    '61.2 ±1.4'
    """
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    scale, digits = (100.0, 1) if heading.percent else (1.0, 4)

    def write(value: float, *, signed: bool = heading.signed) -> str:
        return f"{scale * value:{'+' if signed else ''}.{digits}f}"

    if cell.low is None or cell.high is None:
        return write(cell.value)
    up, down = cell.high - cell.value, cell.value - cell.low
    if abs(up - down) <= 1e-6 * (up + down) + 1e-12:
        return f"{write(cell.value)} ±{write(up, signed=False)}"
    return f"{write(cell.value)} [{write(cell.low)}, {write(cell.high)}]"


def render(tables: Sequence[Table], form: Format, *, bold: bool = False, room: int | None = None) -> list[str]:
    """Lines of all tables; `bold` is for a terminal, where the best is bold instead of marked with a star.

    `room` are the characters of a line of text, for tables that are to be folded.
    """
    return _text(tables, bold, room) if form == "table" else _RENDERERS[form](tables)


def to_json(tables: Iterable[Table]) -> dict[str, Any]:
    """Plain values: every estimate with its interval, in the unit of its column (shares, not percent)."""
    return {
        "tables": [
            {
                "title": table.title,
                "columns": [heading.title for heading in table.headings],
                "rows": [
                    {
                        "name": row.name,
                        "cells": [asdict(cell) if isinstance(cell, Interval) else cell for cell in row.cells],
                    }
                    for row in table.rows
                ],
                "best": [sorted(table.rows[row].name for row in best) for best in table.best],
                "notes": list(table.notes),
            }
            for table in tables
        ]
    }


def _texts(table: Table, mark: Callable[[str], str]) -> list[list[str]]:
    rows = [
        [cell_text(cell, heading) for cell, heading in zip(row.cells, table.headings, strict=True)]
        for row in table.rows
    ]
    for place, best in enumerate(table.best):
        for number in best:
            rows[number][place] = mark(rows[number][place])
    return rows


def _text(tables: Sequence[Table], bold: bool, room: int | None) -> list[str]:
    lines: list[str] = []
    for table in tables:
        texts = _texts(table, lambda text: f"{text}*")
        names = [row.name for row in table.rows]
        first = max(map(len, ["", *names]))
        titles = [heading.title for heading in table.headings]
        widths = [max(map(len, column)) for column in zip(titles, *texts, strict=True)]
        lines.append(table.title)
        for block in column_blocks(first, widths, room, gap=2):
            lines.append(_line("", titles, first, widths, block, bold=False))
            lines += [
                _line(name, line, first, widths, block, bold=bold) for name, line in zip(names, texts, strict=True)
            ]
        lines += [f"  {note}" for note in table.notes]
        lines.append("")
    return lines[:-1]


def _line(
    name: str, texts: Sequence[str], first: int, widths: Sequence[int], block: Iterable[int], *, bold: bool
) -> str:
    padded = [texts[place].rjust(widths[place]) for place in block]
    if bold:
        padded = [f"\x1b[1m{text[:-1].rjust(len(text))}\x1b[0m" if text.endswith("*") else text for text in padded]
    return "  ".join([name.ljust(first), *padded]).rstrip()


def _markdown(tables: Sequence[Table]) -> list[str]:
    lines: list[str] = []
    for table in tables:
        titles = [_escaped(heading.title) for heading in table.headings]
        lines += [f"**{_escaped(table.title)}**", "", f"| | {' | '.join(titles)} |", f"|---|{'---:|' * len(titles)}"]
        for row, texts in zip(table.rows, _texts(table, lambda text: f"**{text}**"), strict=True):
            lines.append(f"| {_escaped(row.name)} | {' | '.join(texts)} |")
        lines += ["", *(f"{_escaped(note)}  " for note in table.notes), ""]
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


_CELL: tuple[str, ...] = ("table", "row", "column", "value", "low", "high", "best")


def cells(tables: Iterable[Table]) -> list[dict[str, Any]]:
    """Every cell with its table, row and column, its interval, and 1 where it is the best of its column."""
    found = []
    for table in tables:
        best = table.best
        for number, row in enumerate(table.rows):
            for place, (cell, heading) in enumerate(zip(row.cells, table.headings, strict=True)):
                values = [cell.value, cell.low, cell.high] if isinstance(cell, Interval) else [cell, None, None]
                line = [table.title, row.name, heading.title, *values, int(number in best[place])]
                found.append(dict(zip(_CELL, line, strict=True)))
    return found


def _csv(tables: Sequence[Table]) -> list[str]:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _CELL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells(tables))
    return stream.getvalue().splitlines()


def render_html(tables: Iterable[Table]) -> str:
    """The tables for a notebook; the best of a column has a star."""
    parts = []
    for table in tables:
        texts = _texts(table, lambda text: f"{text}*")
        rows = [[row.name, *line] for row, line in zip(table.rows, texts, strict=True)]
        shown = html_table(["", *(heading.title for heading in table.headings)], rows)
        parts.append(f"<b>{escape(table.title)}</b>{shown}<p>{'<br>'.join(map(escape, table.notes))}</p>")
    return "".join(parts)


def _json(tables: Sequence[Table]) -> list[str]:
    return json.dumps(to_json(tables), indent=2, ensure_ascii=False).splitlines()


_RENDERERS: dict[Format, Callable[[Sequence[Table]], list[str]]] = {
    "md": _markdown,
    "csv": _csv,
    "json": _json,
}
