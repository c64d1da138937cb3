"""The one exception that users see; flags in its message as keys, and the nearest known name."""

import re
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


FLAG_OF = {"specialists": "specialist", "parts": "with", "gap": "gap-closure"}
"""Key -> its flag, where that is not the key itself."""
_FLAG = re.compile(r"`[^`]*`|--([a-z]+(?:-[a-z]+)*)")


def as_keys(message: str, keys: Iterable[str]) -> str:
    """The flags in a message as keys, where they are among `keys`; commands in back-quotes stay.

    >>> as_keys("--top-k 9: give at most 8; see `moesaic plan --json`", ["top_k"])
    'top_k 9: give at most 8; see `moesaic plan --json`'
    """
    known = {FLAG_OF.get(key, key.replace("_", "-")): key for key in keys}
    return _FLAG.sub(lambda match: known.get(match[1] or "", match[0]), message)
