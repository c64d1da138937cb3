import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from moesaic.checkpoint.record import model_card, write_card


def card(**changes: Any) -> str:
    arguments: dict[str, Any] = {
        "title": "four experts",
        "bases": ["Qwen/Qwen3-0.6B@main", "org/code", "Qwen/Qwen3-0.6B"],
        "tags": ["divmoe", "moesaic"],
        "command": ["moesaic", "upcycle", "Qwen/Qwen3-0.6B", "out dir", "--experts", "4"],
        "facts": {"Experts": 4, "Active": "2 of 4"},
    }
    return model_card(**{**arguments, **changes})


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_front_matter_and_table(tmp_path: Path) -> None:
    write_card(tmp_path, card(license_name="apache-2.0"))
    text = (tmp_path / "README.md").read_text()
    assert front(text) == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "base_model": ["Qwen/Qwen3-0.6B", "org/code"],
        "tags": ["moesaic", "mixture-of-experts", "divmoe"],
    }
    assert "moesaic upcycle Qwen/Qwen3-0.6B 'out dir' --experts 4" in text
    assert "| Experts | 4 |" in text
    assert ModelCard(text).data.to_dict()["base_model"] == ["Qwen/Qwen3-0.6B", "org/code"]


def test_folders_are_base_models_as_they_were_given(tmp_path: Path) -> None:
    folder = tmp_path / "org" / "base@v2"
    folder.mkdir(parents=True)
    given = ["/home/me/model", "./x", "../a/b", "model", str(folder)]
    assert front(card(bases=given))["base_model"] == given


EVIL = [
    "a | b\n| c",
    "<script>alert(1)</script>",
    "```\n# hello",
    "[x](javascript:alert(1))",
    "---\nlicense: mit\n---",
    "`x` **y** ~z~",
    "\\| &lt;script&gt;",
]


@pytest.mark.parametrize("text", EVIL)
def test_user_text_stays_text(text: str) -> None:
    harmless = card(facts={"a": "b"})
    evil = card(title=text, facts={text: text}, tags=[text], command=["moesaic", text])
    assert front(evil)["tags"][2] == " ".join(text.split())
    assert "license" not in front(evil)
    body = evil.split("---\n", 2)[2]
    before, after = body.split("moesaic.json", 1)
    table = after.split("| What | Value |", 1)[1].splitlines()
    assert len(table) == len(harmless.split("| What | Value |", 1)[1].splitlines())
    assert table[2].count("|") == 3
    for part in (before, table[2]):
        assert not set(part.replace("`moesaic.json`", "")) & set("<>[]*~\\")
    assert "`" not in table[2]
    fence = after.split("\n")[2]
    assert set(fence.removesuffix("bash")) == {"`"}
    code = after.split(fence + "\n", 1)[1].split("\n" + fence.removesuffix("bash") + "\n", 1)[0]
    assert shlex.split(code) == ["moesaic", text]
