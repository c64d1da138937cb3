"""The model card (README.md) of an output. Everything that comes from users or checkpoints is escaped. Torch-free."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from moesaic.checkpoint.pio import explained

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(@\S+)?")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>|#!~$&]")


def front_matter(*, bases: Sequence[str], tags: Sequence[str], license_name: str | None = None) -> str:
    """The YAML block at the top of a card, with its fences: `library_name`, `license`, `base_model` and `tags`.

    `bases` are names as the user gave them; they become `base_model`, hub ids without their revision.
    """
    front: dict[str, object] = {"library_name": "transformers"}
    if license_name:
        front["license"] = _line(license_name)
    front["base_model"] = list(dict.fromkeys(map(_without_revision, bases)))
    front["tags"] = list(dict.fromkeys(["moesaic", "mixture-of-experts", *map(_line, tags)]))
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n"


def model_card(
    *,
    title: str,
    bases: Sequence[str],
    tags: Sequence[str],
    command: Sequence[str],
    facts: Mapping[str, object],
    license_name: str | None = None,
) -> str:
    """Markdown with front matter, the command and a table of facts.

    `command` is the argument list, quoted for a shell; `facts` are the table's rows in order.
    """
    rows = [f"| {escape(name)} | {escape(value)} |" for name, value in facts.items()]
    parts = [
        front_matter(bases=bases, tags=tags, license_name=license_name),
        f"# {escape(title)}",
        "",
        "Made with Moesaic; `moesaic.json` records recipe, seed, versions and hashes.",
        "",
        fenced(shlex.join(command), language="bash"),
        "",
        "| What | Value |",
        "|---|---|",
        *rows,
        "",
    ]
    return "\n".join(parts)


def _without_revision(base: str) -> str:
    match = None if Path(base).exists() else _HUB_ID.fullmatch(base)
    return match[1] if match else base


def write_card(folder: Path, card: str) -> None:
    """Write the card as README.md."""
    path = folder / "README.md"
    with explained(path):
        path.write_text(card, encoding="utf-8")


def escape(value: object) -> str:
    """Plain text for a paragraph, heading or table cell: one line, no markup, no HTML."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", _line(value))


def fenced(text: str, *, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _line(value: object) -> str:
    return " ".join(str(value).split())
