"""What people met in training: masked steps, ids that a model lacks, token ids of a config, Ctrl-C, silent routers."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.recipe import load_recipe
from moesaic.training import run as run_module
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from moesaic.training.state import list_states, read_run
from tests.tiny_training import DENSE, tiny_recipe


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def run(values: dict[str, Any], out: Path, *, quiet: bool = True, resume: bool = False) -> Any:
    return train(load_recipe(TrainRecipe, values), out, quiet=quiet, resume=resume)


def steps(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "step"]


# --- steps without a label (case 31) ----------------------------------------------------------------------------------


def masked_recipe(folder: Path, prompts: list[str], **changes: Any) -> dict[str, Any]:
    """Prompts and answers of one token; a document is its prompt, its answer and an end token."""
    recipe = tiny_recipe(folder, batch={"tokens": 32, "micro_sequences": 1}, **changes)
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": "a"}) + "\n" for prompt in prompts))
    source = {"path": str(path), "prompt": "prompt", "completion": "completion"}
    return recipe | {"data": {"sequence_length": 32, "sources": [source]}}


def test_a_step_in_which_every_label_is_masked_moves_nothing_and_says_so(tmp_path, capsys):
    # One document of 10,002 tokens: the first 312 sequences are all prompt.
    recipe = masked_recipe(tmp_path / "in", ["b" * 10_000], budget={"steps": 3}, checkpoint={"every_steps": 1})
    recipe["losses"] = {"balance": {"coefficient": 0.1}, "bias_balancing": 0.1, "router_z": 0.1}
    result = run(recipe, tmp_path / "out", quiet=False)
    assert result.loss is None
    assert [line["loss"] for line in steps(tmp_path / "out")] == [None] * 3
    assert capsys.readouterr().err.count("every label is masked, so there is no loss and nothing moves") == 1
    first, last = (list_states(tmp_path / "out" / "state")[place] for place in (0, -1))
    for part in ("model", "optimizer"):
        (before,), (after,) = (list((state / part).glob("*.safetensors")) for state in (first, last))
        one, other = load_file(before), load_file(after)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_with_masked_steps_resumes_as_if_it_had_not_stopped(tmp_path):
    recipe = masked_recipe(tmp_path / "in", ["b" * 50, "cd" * 10], optimizer={"lr": 1e-2}, budget={"steps": 6})
    run(recipe, tmp_path / "whole")
    losses = [line["loss"] for line in steps(tmp_path / "whole")]
    assert None in losses[:3]
    assert any(losses)
    run(recipe | {"checkpoint": {"every_steps": 3}}, tmp_path / "parts")
    for state in list_states(tmp_path / "parts" / "state")[1:]:
        (state / "run.json").unlink()  # as if it had been killed after step 3
    run(recipe, tmp_path / "parts", resume=True)
    assert [line["loss"] for line in steps(tmp_path / "parts")] == losses
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


# --- ids that are used (cases 28 and 29) ------------------------------------------------------------------------------


def with_token(folder: Path, token: str, *, hole: int = 0) -> Path:
    """The tiny tokenizer (43 tokens, ids to 42) with one token more; `hole` ids are left out before it."""
    tokenizer = json.loads((folder / "tokenizer" / "tokenizer.json").read_text())
    number = 43 + hole
    added = {"id": number, "content": token, "special": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append(added | flags)
    tokenizer["model"]["vocab"][token] = number
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder / "tokenizer"


def test_a_token_that_no_text_uses_may_lie_outside_of_the_model(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    recipe["model"] = recipe["model"] | {"config": DENSE | {"vocab_size": 43}}
    with_token(tmp_path / "in", "<extra>")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "in" / "tokenizer")) == 44
    assert run(recipe, tmp_path / "out").loss > 0


def test_a_padding_token_outside_of_the_model_pads_with_another(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={})
    recipe["data"] |= {"epochs": 1}
    recipe["model"] = recipe["model"] | {"config": DENSE | {"vocab_size": 43}}
    with_token(tmp_path / "in", "<padding>")
    path = tmp_path / "in" / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(load_json(path) | {"pad_token": "<padding>"}))
    assert run(recipe, tmp_path / "out").loss > 0


def test_an_id_that_a_text_uses_and_the_model_lacks_is_one_line_in_every_verb(tmp_path):
    """Ids with a hole: 44 tokens, the largest id is 60, the model has 48."""
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2}, validation={})
    moe = tmp_path / "moe"
    run(recipe, moe)
    with_token(tmp_path / "in", "@", hole=17)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (moe / name).write_bytes((tmp_path / "in" / "tokenizer" / name).read_bytes())
    texts = tmp_path / "corpus" / "perplexity.jsonl"
    texts.parent.mkdir()
    texts.write_text('{"text": "some @ text that is long enough"}\n' * 8)
    data = {"sequence_length": 8, "sources": [{"path": str(texts)}]}
    calls = {
        "train": lambda: run(recipe | {"model": str(moe), "tokenizer": None, "data": data}, tmp_path / "out"),
        "select": lambda: moesaic.select(moe, keep=4, data=str(texts)),
        "expand": lambda: moesaic.expand(
            moe, tmp_path / "out", experts=12, utility="gradient_norm", calibration=(str(texts),), sequence_length=8
        ),
        "inspect": lambda: moesaic.inspect(moe, tmp_path / "out", data=(str(texts),), min_length=4),
        "generate": lambda: moesaic.generate(moe, "a @ b", device="cpu"),
        "eval": lambda: moesaic.evaluate(moe, suite="perplexity", data_dir=str(texts.parent), domain_field=""),
    }
    for verb, call in calls.items():
        with pytest.raises(MoesaicError) as error:
            call()
        assert "its tokenizer gives token 60, but the model has only 48" in str(error.value), verb
        assert "\n" not in str(error.value)


# --- what the config says (cases 33 and 34) ---------------------------------------------------------------------------


def test_a_model_from_scratch_takes_begin_end_and_padding_from_the_tokenizer(tmp_path):
    """The tiny tokenizer's `<pad>` is 0 and `<eos>` 1; Llama's own end is 2."""
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "moe")
    run(recipe | {"model": recipe["model"] | {"moe": None}, "losses": {}}, tmp_path / "dense")
    moesaic.upcycle(tmp_path / "dense", tmp_path / "up", method="sparse", experts=4, top_k=2)
    moesaic.export(tmp_path / "up", tmp_path / "native", to="mixtral")
    for name in ("moe", "dense", "up", "native"):
        for file in ("config.json", "generation_config.json"):
            found = load_json(tmp_path / name / file)
            assert [found.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")] == [None, 1, 0], name
        assert load_json(tmp_path / name / "config.json")["use_cache"] is True
    embedding = load_file(tmp_path / "dense" / "model.safetensors")["model.embed_tokens.weight"]
    assert embedding[0].abs().sum() > 0  # not drawn as a padding row


def test_an_end_that_is_not_the_tokenizers_gives_way_and_that_is_said(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    ids = {"bos_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
    recipe["model"] = recipe["model"] | {"config": DENSE | ids}
    run(recipe, tmp_path / "out")
    assert "model.config.eos_token_id: is 2, but the tokenizer's is 1, which the result says" in capsys.readouterr().err
    found = load_json(tmp_path / "out" / "config.json")
    assert {key: found[key] for key in ids} == ids | {"eos_token_id": 1}


def test_another_tokenizer_brings_its_ids_to_a_trained_model(tmp_path):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 2})
    run(recipe, tmp_path / "first")
    other = AutoTokenizer.from_pretrained(tmp_path / "in" / "tokenizer")
    assert isinstance(other, PreTrainedTokenizerFast)
    other.eos_token = ";"
    other.save_pretrained(tmp_path / "other")
    run(recipe | {"model": str(tmp_path / "first"), "tokenizer": str(tmp_path / "other")}, tmp_path / "second")
    for file in ("config.json", "generation_config.json"):
        assert load_json(tmp_path / "second" / file)["eos_token_id"] == other.eos_token_id != 1


# --- Ctrl-C (case 37) -------------------------------------------------------------------------------------------------


def interrupt(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Send Ctrl-C in the third step."""

    def interrupted(*args: Any, step: int, **more: Any) -> Any:
        for _ in range(times if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return step_before(*args, step=step, **more)

    step_before = run_module.run_step
    monkeypatch.setattr(run_module, "run_step", interrupted)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, monkeypatch, capfd):
    before = signal.getsignal(signal.SIGINT)
    recipe = tiny_recipe(tmp_path / "in")
    with monkeypatch.context() as patched:
        interrupt(patched, 1)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path / "out", quiet=False)
    said = capfd.readouterr().err
    assert "saving after this step; Ctrl-C again ends at once" in said
    assert "stopped by Ctrl-C after step 3; --resume goes on from there" in said
    assert [state.name for state in list_states(tmp_path / "out" / "state")] == ["step-00000003"]
    assert signal.getsignal(signal.SIGINT) == before
    run(recipe, tmp_path / "out", resume=True)
    assert [line["step"] for line in steps(tmp_path / "out")] == list(range(1, 9))


def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    interrupt(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_recipe(tmp_path / "in"), tmp_path / "out")
    assert list_states(tmp_path / "out" / "state") == []
    assert len(steps(tmp_path / "out")) == 2


# --- routing that harms (issue 20, part 4) ----------------------------------------------------------------------------


def test_a_router_that_sends_everything_to_the_same_experts_is_said_once(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path / "in", budget={"steps": 6}, losses={}, optimizer={"lr": 1e-9, "frozen": ["*gate*"]})
    run(recipe | {"budget": {"steps": 1}}, tmp_path / "first")
    weights = load_file(tmp_path / "first" / "model.safetensors")
    for name in (name for name in weights if name.endswith("mlp.gate.weight")):
        weights[name].zero_()  # all logits tie, so every token goes to experts 0 and 1
    save_file(weights, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
    run(recipe | {"model": str(tmp_path / "first"), "tokenizer": None}, tmp_path / "out", quiet=False)
    said = capsys.readouterr().err
    assert said.count("the router is constant") == 1
    assert "routing in 2 of 2 MoE layers (counted from 0: 0, 1)" in said
    assert "losses.balance" in said


def test_the_state_counts_the_steps_that_moved_nothing(tmp_path):
    recipe = masked_recipe(tmp_path / "in", ["b" * 10_000], budget={"steps": 2})
    run(recipe, tmp_path / "out")
    assert read_run(list_states(tmp_path / "out" / "state")[-1]).reset_step == 2
