"""Tables that are wider than the terminal: blocks of as many columns as fit, each with the names of the rows."""

import shutil
import sys
from collections.abc import Sequence


def room() -> int | None:
    """Characters of a line where stdout is a terminal; None for a file or a pipe, whose lines have no end."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def column_blocks(names: int, widths: Sequence[int], room: int | None, *, gap: int) -> list[range]:
    """The columns of each block: as many as fit beside the names of the rows, one at least.

    >>> column_blocks(10, [5, 5, 5, 30], 24, gap=2)
    [range(0, 2), range(2, 3), range(3, 4)]
    >>> column_blocks(10, [5, 5, 5, 30], None, gap=2)
    [range(0, 4)]

    Args:
        names: width of the names.
        widths: of the columns.
        room: of a line; None: any.
        gap: between two columns.
    """
    if room is None or not widths:
        return [range(len(widths))]
    starts, used = [0], names + gap + widths[0]
    for place, width in enumerate(widths[1:], start=1):
        used += gap + width
        if used > room:
            starts.append(place)
            used = names + gap + width
    return [range(first, last) for first, last in zip(starts, [*starts[1:], len(widths)], strict=True)]
