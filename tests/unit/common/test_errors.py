"""Flags in messages as keys."""

from dataclasses import dataclass

import pytest

from moesaic.cli.verbs import COMMANDS
from moesaic.common.errors import FLAG_OF, MoesaicError, as_keys
from moesaic.common.verbs import verb


@pytest.mark.parametrize(
    ("message", "keys", "expected"),
    [
        ("--experts 33 needs more than --cap 3; --top-k-x no-op", ["experts", "cap", "top_k"],
         "experts 33 needs more than cap 3; --top-k-x no-op"),
        ("--with x, --specialist a=b", ["parts", "specialists"], "parts x, specialists a=b"),
        ("--to dense and --specialist NAME: one needs the other", ["to", "specialist"],
         "to dense and specialist NAME: one needs the other"),
        ("convert it: `moesaic export A B --to moesaic`, or leave --to out", ["to"],
         "convert it: `moesaic export A B --to moesaic`, or leave to out"),
    ],
)  # fmt: skip
def test_flags_become_keys_that_are_known(message, keys, expected):
    assert as_keys(message, keys) == expected


def test_flags_that_are_not_their_key_are_known():
    flags = {
        key: option.flag.removeprefix("--")
        for command in COMMANDS.values()
        for key, option in command.options.items()
        if option.flag
    }
    assert flags == FLAG_OF


@dataclass(frozen=True, kw_only=True)
class SizeRecipe:
    top_k: int = 2
    """Active experts."""


class TooLargeError(MoesaicError):
    pass


@verb(SizeRecipe)
def size(recipe: SizeRecipe, *, dry_run: bool = False) -> None:
    """Refuses."""
    raise TooLargeError(f"--top-k {recipe.top_k}: too large with --dry-run; see --json")


def test_a_verb_names_keywords_and_its_command_names_flags():
    for call in (lambda: size(top_k=3), lambda: size(SizeRecipe(top_k=3))):
        with pytest.raises(TooLargeError, match=r"^top_k 3: too large with dry_run; see --json$"):
            call()
    with pytest.raises(TooLargeError, match=r"^--top-k 3: too large with --dry-run; see --json$"):
        size.run(SizeRecipe(top_k=3))
