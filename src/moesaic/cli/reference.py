"""The tables of options in the documentation, made from what makes the flags.

`python -m moesaic.cli.reference docs/*.md` writes, in these files, what stands between a line `<!-- options VERB -->`
and the next `<!-- end -->` anew.
"""

import re
import sys
import typing
from pathlib import Path
from typing import Literal

from moesaic.cli.build import flags, named
from moesaic.cli.verbs import COMMANDS

_TABLE = re.compile(r"(<!-- options ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(verb: str) -> str:
    """The options of a verb as a Markdown table."""
    command = COMMANDS[verb]
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for key, (kind, described) in flags(command, named(command.recipe)).items():
        name = "".join(described.name or ()) or f"--{key.replace('_', '-')}"
        value = "" if kind is bool else f" {described.metavar or _placeholder(kind)}"
        default = described.show_default if isinstance(described.show_default, str) else ""
        rows.append(f"| `{name}{value}` | {_cell(default)} | {_cell(described.help or '')}{_choices(kind)} |")
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """A page with its tables as the code has them."""
    return _TABLE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def _placeholder(kind: object) -> str:
    return "CHOICE" if typing.get_origin(kind) is Literal else "X" if kind is float else "N"


def _choices(kind: object) -> str:
    if typing.get_origin(kind) is not Literal:
        return ""
    return f" One of {', '.join(f'`{choice}`' for choice in typing.get_args(kind))}."


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(rewritten(file.read_text(encoding="utf-8")), encoding="utf-8")
