"""The one exception that users see, and the nearest known name for its message."""

from collections.abc import Iterable
from difflib import get_close_matches


class MoesaicError(ValueError):
    """A mistake in the input: one line that names the file, key or flag and the way out.

    The command line prints the message without a traceback and exits with `status`.
    """

    status = 2


def suggest(word: str, known: Iterable[str]) -> str:
    """Say how a wrong name could be put right: the nearest known name, or all of them where none is near.

    >>> suggest("divmeo", ["btx", "divmoe"])
    "did you mean 'divmoe'?"
    >>> suggest("zzz", ["btx", "divmoe"])
    'known: btx, divmoe'
    """
    names = [str(name) for name in known]
    by_folded_name = {name.casefold(): name for name in names}
    near = get_close_matches(word.casefold(), by_folded_name, n=1)
    if near:
        return f"did you mean {by_folded_name[near[0]]!r}?"
    return f"known: {', '.join(names) or '(none)'}"
