"""OUT before a run: what is never removed, and what an interrupted removal leaves."""

import shutil
from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.training import folder as folder_module
from moesaic.training.folder import clear_folder, list_states, refuse_content, refuse_overlap
from moesaic.training.recipe import TrainRecipe


def recipe_of(*, data: str = "nowhere.jsonl", held_out: str = "nowhere.jsonl", **changes: str) -> TrainRecipe:
    values = {
        "model": "org/name",
        "data": {
            "sequence_length": 16,
            "sources": [{"path": data, "domain": "a"}],
            "validation": [{"path": held_out, "domain": "a"}],
        },
        "optimizer": {"lr": 1e-3},
        "batch": {"tokens": 16},
        "budget": {"steps": 1},
    }
    return load_recipe(TrainRecipe, values | changes)


def make_run(out: Path) -> Path:
    """What a finished run leaves, a state included."""
    for name in ("config.json", "recipe.yaml", "metrics.jsonl", "a.safetensors", "state/lock"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    for name in ("run.json", "model/a.safetensors"):
        (out / "state" / "step-00000001" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "state" / "step-00000001" / name).write_text(name)
    return out


@pytest.mark.parametrize("key", ["data", "held_out", "model", "tokenizer"])
@pytest.mark.parametrize("path", ["~/out", "~/out/texts", "~/out/texts/a.jsonl"])
def test_what_lies_in_out_by_its_home_folder_is_read_and_not_removed(tmp_path, monkeypatch, key, path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "out" / "texts").mkdir(parents=True)
    (tmp_path / "out" / "texts" / "a.jsonl").write_text("{}")
    with pytest.raises(MoesaicError, match=f"is, holds or lies in {path}, which the recipe reads"):
        refuse_overlap(tmp_path / "out", recipe_of(**{key: path}))
    refuse_overlap(tmp_path / "other", recipe_of(**{key: path}))


def test_a_model_in_a_folder_that_is_called_like_the_home_folder_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~" / "base").mkdir(parents=True)
    with pytest.raises(MoesaicError, match="is, holds or lies in ~/base"):
        refuse_overlap(tmp_path / "~", recipe_of(model="~/base"))


def test_a_home_folder_that_is_not_there_is_one_line():
    with pytest.raises(MoesaicError, match="~nobody-here/x: there is no such home folder; write the path in full"):
        refuse_overlap(Path("out"), recipe_of(data="~nobody-here/x"))


@pytest.mark.parametrize("key", ["data", "held_out"])
def test_out_does_not_lie_in_a_folder_of_data(tmp_path, key):
    """Its own config.json would be read as data when the run goes on."""
    (tmp_path / "corpus").mkdir()
    with pytest.raises(MoesaicError, match="corpus, which the recipe reads; choose another OUT"):
        refuse_overlap(tmp_path / "corpus" / "runs" / "out", recipe_of(**{key: str(tmp_path / "corpus")}))


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path):
    out, elsewhere = make_run(tmp_path / "out"), make_run(tmp_path / "elsewhere")
    (out / "plots").symlink_to(elsewhere, target_is_directory=True)
    (out / "state" / "step-00000002").symlink_to(elsewhere / "state" / "step-00000001", target_is_directory=True)
    (out / "gone").symlink_to(tmp_path / "nowhere")
    clear_folder(out)
    assert sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) == ["state", "state/lock"]
    assert (elsewhere / "config.json").exists()
    assert list_states(elsewhere / "state")


def test_a_removal_that_is_cut_short_leaves_no_checkpoint_and_no_state_and_may_begin_again(tmp_path, monkeypatch):
    out = make_run(tmp_path / "out")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt(path)

    monkeypatch.setattr(folder_module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        clear_folder(out)
    monkeypatch.undo()
    assert not (out / "config.json").exists()
    assert not list_states(out / "state")
    assert (out / "state" / "step-00000001").exists()
    refuse_content(out, resume=False, overwrite=True)
    clear_folder(out)
    assert [path.name for path in out.iterdir()] == ["state"]
    shutil.rmtree(out)
