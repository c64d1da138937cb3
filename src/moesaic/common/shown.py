"""How the result of a verb shows itself in Python: one line at the prompt, a table in a notebook, a frame of pandas."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_CHARACTERS = 160  # of the one line
_MOST_ROWS = 12  # of the table in a notebook
_MOST_COLUMNS = 12


class Shown:
    """What a verb returns: `lines()` for people, `to_dict()` for programs, `to_pandas()` for tables."""

    def lines(self) -> list[str]:
        """What the command line prints."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values: what the command line prints with `--json`."""
        raise NotImplementedError

    def brief(self) -> str:
        """What matters most, in one line."""
        return self.lines()[0]

    def rows(self) -> list[dict[str, Any]]:
        """The lines of the table; one with every plain value of `to_dict()` where a result is no table itself."""
        return [dict(_plain_values(self.to_dict()))]

    def to_pandas(self) -> "DataFrame":
        """The result as a table, for `pandas.concat` over several of them, for plots and for files.

        Raises:
            MoesaicError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise MoesaicError("to_pandas(): needs pandas: pip install 'moesaic[notebooks]'") from error
        return DataFrame.from_records(self.rows())

    def __repr__(self) -> str:
        line = " ".join(self.brief().split())
        line = line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}…"
        return f"<{type(self).__name__}: {line}>"

    def _repr_html_(self) -> str:
        rows = self.rows()
        text = escape("\n".join(self.lines()))
        table = html_table(list(rows[0]), [list(row.values()) for row in rows]) if len(rows) > 1 else ""
        return f"<b>{type(self).__name__}</b><pre>{text}</pre>{table}"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, most: int = _MOST_ROWS) -> str:
    """A table of HTML: its first rows and columns, and how many more there are; numbers in four digits."""
    shown = min(len(columns), _MOST_COLUMNS)
    head = "".join(f"<th>{escape(name)}</th>" for name in columns[:shown])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_text(value))}</td>' for value in row[:shown])}</tr>" for row in rows[:most]
    )
    left = [(len(rows) - most, "rows"), (len(columns) - shown, "columns")]
    more = ", ".join(f"{count:,} more {what}" for count, what in left if count > 0)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" + (
        f"<p>… {more}: <code>to_pandas()</code></p>" if more else ""
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _plain_values(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Texts, numbers and None, those of documents within documents under `outer.inner`; lists are no cells."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _plain_values(value, f"{before}{key}.")
        elif value is None or isinstance(value, str | int | float):
            yield f"{before}{key}", value
