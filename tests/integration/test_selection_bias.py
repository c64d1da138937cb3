"""The selection bias of a trained model is a tensor of it; and what `train` does and says of routers at its start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moesaic
from moesaic import expand
from moesaic.common.errors import MoesaicError
from moesaic.routing.install import find_installation, find_routers
from moesaic.training.recipe import load_train_recipe
from moesaic.training.run import train
from tests.tiny_training import DENSE, MOE, VOCABULARY, tiny_recipe

IDS = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
NAMES = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]
CONFIG = {"output_router_logits": True, "router_aux_loss_coef": 10.0}


def run(recipe: dict[str, Any], out: Path) -> Path:
    train(load_train_recipe(recipe), out, quiet=True)
    return out


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOESAIC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict[str, Any]:
    losses = {"balance": {"coefficient": 0.1}, "bias_balancing": 0.01}
    return tiny_recipe(tmp_path_factory.mktemp("in"), losses=losses, budget={"steps": 3})


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory) -> Path:
    return run(recipe, tmp_path_factory.mktemp("trained") / "out")


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "moesaic.json").read_text())


def biases_of(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return torch.stack([tensors[name] for name in NAMES])


def written_before(folder: Path, out: Path) -> Path:
    """The same model as versions before wrote it: the bias in moesaic.json alone."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    bias = [tensors.pop(name).tolist() for name in NAMES]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    for key in ("selection_bias", "output_router_logits", "router_aux_loss_coef", "routed_scaling_factor"):
        config.pop(key)
    (out / "config.json").write_text(json.dumps(config))
    rule = {"rule": None, "pool_size": None, "pool_draw": "document_and_layer", "expert_groups": None}
    routing = {"rule": rule | {"group_score": None}, "selection_bias": bias}
    (out / "moesaic.json").write_text(json.dumps(record_of(out) | {"routing": routing}))
    return out


def test_transformers_alone_has_it(trained, tmp_path):
    assert biases_of(trained).any()
    assert record_of(trained)["routing"] is None
    model = AutoModelForCausalLM.from_pretrained(trained)
    assert logits_of(model).equal(logits_of(moesaic.load(trained)))
    model.save_pretrained(tmp_path / "again")
    assert logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "again")).equal(logits_of(model))
    for router, _ in find_routers(model):
        router.e_score_correction_bias.zero_()  # pyright: ignore[reportCallIssue]
    assert not logits_of(model).equal(logits_of(moesaic.load(trained)))


def test_a_checkpoint_with_the_bias_in_its_record_has_equal_logits(trained, tmp_path):
    old = moesaic.load(written_before(trained, tmp_path / "old"))
    assert find_installation(old) is not None
    assert logits_of(old).equal(logits_of(moesaic.load(trained)))


def test_further_runs_go_on_with_it(trained, recipe, tmp_path):
    further = recipe | {"tokenizer": None, "losses": {}, "budget": {"steps": 2}}
    for name, source in (("new", trained), ("old", written_before(trained, tmp_path / "before"))):
        out = run(further | {"model": str(source)}, tmp_path / name)
        assert biases_of(out).equal(biases_of(trained)), name


def test_a_resumed_run_ends_with_the_same_bytes(trained, recipe, tmp_path):
    out = tmp_path / "out"
    more = recipe | {"model": str(trained), "tokenizer": None, "checkpoint": {"every_steps": 2}}
    run(more, out)
    whole = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out / "state" / "step-00000003")
    train(load_train_recipe(more), out, resume=True, quiet=True)
    assert (out / "model.safetensors").read_bytes() == whole
    assert not biases_of(out).equal(biases_of(trained))


def test_uniform_copies_share_it(trained, tmp_path):
    result = expand(trained, tmp_path / "grown", experts=16, top_k=4, delta=0)
    assert result.statement.code == "E1"
    torch.testing.assert_close(biases_of(tmp_path / "grown"), biases_of(trained).repeat(1, 2) / 2)
    grown, before = (logits_of(moesaic.load(folder, dtype=torch.float64)) for folder in (tmp_path / "grown", trained))
    torch.testing.assert_close(grown, before, rtol=0, atol=1e-6)
    uneven = expand(trained, tmp_path / "uneven", experts=10, utility="weight_norm", delta=0)
    assert uneven.statement.code == "none"
    assert "selection bias" in uneven.statement.text
    copies = expand(
        trained, tmp_path / "groups", experts=10, routing="one_per_copy_group", utility="weight_norm", delta=0
    )
    assert copies.statement.code == "E2"
    groups = logits_of(moesaic.load(tmp_path / "groups", dtype=torch.float64))
    torch.testing.assert_close(groups, before, rtol=0, atol=1e-6)


def test_a_part_has_the_biases_of_its_experts(trained, tmp_path):
    moesaic.select(trained, tmp_path / "choice.json", keep="4", method="random")
    moesaic.extract(trained, tmp_path / "choice.json", tmp_path / "part")
    kept = json.loads((tmp_path / "choice.json").read_text())["kept"]
    expected = torch.stack([row[ids] for row, ids in zip(biases_of(trained), kept, strict=True)])
    assert biases_of(tmp_path / "part").equal(expected)


def test_native_families_without_one_are_refused(trained, tmp_path):
    with pytest.raises(MoesaicError, match="selection bias: added to the probabilities"):
        moesaic.export(trained, tmp_path / "native", to="auto")
    moesaic.export(trained, tmp_path / "ours", to="moesaic")
    assert biases_of(tmp_path / "ours").equal(biases_of(trained))


def test_train_never_adds_the_models_own_balancing_loss(recipe, tmp_path):
    losses = []
    for name, config in (("without", DENSE), ("with", DENSE | CONFIG)):
        model = {"family": "llama", "config": config, "moe": MOE}
        out = run(recipe | {"model": model, "losses": {}, "budget": {"steps": 2}}, tmp_path / name)
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["kind"] == "step"])
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "with" / "config.json").read_text())["output_router_logits"] is True


def test_routers_without_a_gradient_are_said_at_the_start(recipe, tmp_path, capsys):
    model = {"family": "llama", "config": DENSE, "moe": MOE | {"top_k": 1, "weighting": "selected"}}
    values = recipe | {"model": model, "losses": {}, "budget": {"steps": 2}}
    train(load_train_recipe(values), tmp_path / "out", quiet=False)
    said = [line for line in capsys.readouterr().err.splitlines() if "has no gradient" in line]
    assert len(said) == 1
    assert said[0].endswith("use weighting all, or 2 active experts")
