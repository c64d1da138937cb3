"""docs/statements.md: a section per code, and only tests that are there."""

import re
from pathlib import Path
from typing import get_args

from moesaic.common.statement import Code

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "statements.md").read_text(encoding="utf-8")


def test_every_code_has_a_section():
    assert set(re.findall(r"^## (\w\d)$", PAGE, re.MULTILINE)) == {*get_args(Code)} - {"none"}


def test_every_section_has_its_proof_and_tests_that_exist():
    there = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[2:]
    assert len(sections) == 9
    for section in sections:
        assert "*When*" in section
        assert "*Proof*" in section
        tests = re.findall(r"`(test_\w+)`", section)
        assert tests
        for name in tests:
            assert f"def {name}(" in there, name
