"""The lab's contract allows the modules that docs/code.md calls public, and no more."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_contract_and_the_page_name_the_same_modules():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (one for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "forbidden")
    allowed = {arrow.partition(" -> ")[2] for arrow in contract["ignore_imports"]}
    page = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    table = page.partition("## What is public")[2].partition("\n## ")[0]
    modules = [line.partition(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    named = [name for cell in modules for name in re.findall(r"`(moesaic\.[\w.*]+)`", cell)]
    assert sorted(allowed) == sorted(named)
