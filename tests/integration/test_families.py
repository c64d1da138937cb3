"""The matrix of docs/families.md for families with a written row: every cell is run on a tiny checkpoint, or refused.

The others are in test_every_moe.py. GGUF and vLLM need engines of their own: `make interop`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import detect_moe
from moesaic.families.moe_table import MOE_FAMILIES as KNOWN_FAMILIES
from moesaic.families.support import COLUMNS, DERIVED, NO, TESTED, markdown, support
from tests.tiny_emo import save_tiny_emo
from tests.tiny_models import tiny_moe_model
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe
from tests.tiny_training import VOCABULARY, save_tokenizer, tiny_recipe, write_documents

ROWS = {row.model_type: row for row in support() if row.model_type in (*KNOWN_FAMILIES, "moesaic_*", "emo")}
YES = TESTED


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("moesaic.probe.MAX_TOKENS", 40)


def save(folder: Path, family: str) -> Path:
    if family == "emo":
        save_tiny_emo(folder, vocab_size=VOCABULARY)
    elif family == "moesaic_*":
        tiny_moe_model("llama", vocab_size=VOCABULARY).save_pretrained(folder)
    else:
        more: dict[str, Any] = {"n_routed_experts": 16} if family in ("deepseek_v3", "glm4_moe") else {}
        save_tiny_moe(folder, family, vocab_size=VOCABULARY, **more)
    return save_tokenizer(folder)


def read(folder, _out):
    moesaic.export(folder, _out / "read", to="moesaic" if folder.name == "emo" else "auto", dry_run=True)
    if folder.name != "emo":
        detect_moe(open_checkpoint(folder))
        moesaic.load(folder)


def train(folder, out):
    recipe = tiny_recipe(out / "in", model=str(folder), tokenizer=None, losses={}, budget={"steps": 2})
    moesaic.train(recipe, out / "trained")
    assert_finite(out / "trained")


def expand(folder, out):
    count = detect_moe(open_checkpoint(folder)).num_experts
    moesaic.expand(folder, out / "larger", experts=2 * count)
    assert detect_moe(open_checkpoint(out / "larger")).num_experts == 2 * count
    assert_finite(out / "larger")


def select(folder, out):
    return moesaic.select(folder, keep="50%", data=str(write_documents(out / "t.jsonl", "math", number=4, seed=0)))


def extract(folder, out):
    selection = select(folder, out)
    moesaic.extract(folder, selection, out / "small")
    assert detect_moe(open_checkpoint(out / "small")).num_experts == selection.counts[0]
    assert_finite(out / "small")


def written(layout):
    def write(folder, out):
        target = "qwen2_moe" if folder.name == "emo" else "auto"
        if folder.name == "moesaic_*":
            target = "moesaic"
        moesaic.export(folder, out / layout, to=target, layout=layout)
        assert_finite(out / layout)
        if folder.name != "emo":
            moesaic.export(out / layout, out / "back", to=target)
            assert_same(folder, out / "back")

    return write


ACTIONS = {
    "read": read,
    "train": train,
    "expand": expand,
    "select": select,
    "extract": extract,
    "write fused": written("fused"),
    "write per-expert": written("per-expert"),
}


def assert_finite(folder):
    logits = moesaic.load(folder, dtype="float32")(input_ids=torch.arange(3, 19)[None], use_cache=False).logits
    assert logits.isfinite().all()


def assert_same(one, other):
    models = [moesaic.load(folder, dtype="float32").state_dict() for folder in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), name


def test_there_is_a_row_for_every_family_and_no_cell_is_unknown():
    assert set(MOE_FAMILIES) | {"moesaic_*", "emo"} == set(ROWS)
    assert set(MOE_FAMILIES) == set(KNOWN_FAMILIES)
    for row in ROWS.values():
        assert set(row.cells) == set(COLUMNS)
        assert all(cell.split(": ")[0] in (TESTED, DERIVED, NO) for cell in row.cells.values())
    for family, row in KNOWN_FAMILIES.items():
        assert row.gguf is not None
        assert (row.gguf.reason != "") == ROWS[family].cells["GGUF"].startswith("no"), family
        assert row.twin is not None or row.no_twin, family


def outcome(act, folder, out):
    """ "yes", or the refusal."""
    out.mkdir()
    try:
        act(folder, out)
    except MoesaicError as error:
        return str(error)
    return YES


@pytest.mark.parametrize("family", ROWS)
def test_cells(tmp_path, family):
    folder = save(tmp_path / family, family)
    found = {name: outcome(act, folder, tmp_path / name.replace(" ", "-")) for name, act in ACTIONS.items()}
    wrong = {name: text for name, text in found.items() if (text == YES) != (ROWS[family].cells[name] == YES)}
    assert not wrong


def test_emo_does_all_of_it_after_export(tmp_path):
    moesaic.export(save(tmp_path / "emo", "emo"), tmp_path / "moesaic_*", to="moesaic")
    actions = {name: ACTIONS[name] for name in ("train", "expand", "select", "extract")}
    found = {name: outcome(act, tmp_path / "moesaic_*", tmp_path / name) for name, act in actions.items()}
    assert set(found.values()) == {YES}


def test_the_page_has_this_table():
    page = (Path(__file__).parents[2] / "docs/families.md").read_text(encoding="utf-8")
    assert markdown(support()) in page


def test_command_line(capsys):
    assert cli.run(["families"]) == 0
    assert "qwen3_moe" in capsys.readouterr().out
    assert cli.run(["families", "emo", "--json"]) == 0
    assert '"model_type": "emo"' in capsys.readouterr().out
    assert cli.run(["families", "mixtrl"]) == 2
    assert "did you mean 'mixtral'" in capsys.readouterr().err
