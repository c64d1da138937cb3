"""The documentation's tables of options are those of the code."""

from pathlib import Path

import pytest

from moesaic.cli.reference import rewritten, table
from moesaic.cli.verbs import COMMANDS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_page_has_the_table_of_its_verb(verb):
    text = (DOCS / f"{verb}.md").read_text(encoding="utf-8")
    assert f"<!-- options {verb} -->\n" in text
    assert rewritten(text) == text, "run: python -m moesaic.cli.reference docs/*.md"


def test_table():
    lines = table("upcycle").splitlines()
    assert lines[:2] == ["| option | default | meaning |", "|---|---|---|"]
    assert any(line.startswith("| `--drop-ratio X` | 0.5 | Share of each expert's") for line in lines)
    assert any(line.startswith("| `--specialist NAME=PATH` |") for line in lines)
    assert any("One of `selected`, `all`." in line for line in lines)
