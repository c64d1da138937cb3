"""`expand:` in a training run: the verb's own bits, the optimizer's state, utilities, the log, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import moesaic
from moesaic.checkpoint.record import write_provenance
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.data.dataset import PackedDataset
from moesaic.data.tokenise import prepare
from moesaic.expansion.utility import FORMAT, measure
from moesaic.training import utilities as growth_utility
from moesaic.training.recipe import TrainRecipe
from moesaic.training.run import train
from moesaic.training.start import load_run_tokenizer
from moesaic.training.state import read_run
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import DENSE, VOCABULARY, save_tokenizer, tiny_recipe

STEP = 3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def grown_recipe(folder: Path, expand: Any, **changes: Any) -> dict[str, Any]:
    changes = {"budget": {"steps": 5}, "checkpoint": {"keep": 10}, "expand": expand} | changes
    return tiny_recipe(folder, **changes)


def run(values: dict[str, Any], out: Path, **keywords: Any):
    return train(load_recipe(TrainRecipe, values), out, quiet=True, **keywords)


def states(out: Path) -> tuple[Path, Path]:
    """The state just before the expansion, and the one right after."""
    return out / "state" / f"step-{STEP:08d}", out / "state" / f"step-{STEP:08d}-expanded"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def lines(out: Path, kind: str) -> list[dict[str, Any]]:
    read = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in read if line["kind"] == kind]


def offline(before: Path, out: Path, record: dict[str, Any], **settings: Any) -> None:
    """`moesaic expand` of the state before, with the utilities that the run recorded."""
    if record["utilities"]:
        config_hash = moesaic_hash(before / "model")
        layers = {layer: {"utility": values} for layer, values in record["utilities"].items()}
        file = out.with_suffix(".json")
        file.write_text(json.dumps({"format": FORMAT, "config_hash": config_hash, "layers": layers}))
        settings = {name: value for name, value in settings.items() if name != "utility"} | {"utility_from": str(file)}
    moesaic.expand(before / "model", out, **settings)


def moesaic_hash(folder: Path) -> str:
    from moesaic.checkpoint.record import source_record
    from moesaic.checkpoint.source import open_checkpoint

    return source_record(open_checkpoint(folder), None)["config_hash"]


SETTINGS = {
    "gradients, plain": {"experts": 11},
    "exact at the same K": {"experts": 13, "routing": "one_per_copy_group", "utility": "approx_fisher"},
    "other starts": {
        "experts": 11,
        "utility": "weight_norm",
        "expert_op": "drop",
        "router_op": "copy_noise",
        "seed": 5,
    },
    "twice, twice as many active": {"experts": 16, "utility": "uniform", "top_k": 4, "delta": 0.0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_expansion_in_a_run_has_the_bits_of_the_verb(tmp_path, name):
    out, settings = tmp_path / "out", SETTINGS[name]
    run(grown_recipe(tmp_path / "in", {"step": STEP, **settings}), out)
    before, after = states(out)
    (record,) = lines(out, "expansion")
    offline(before, tmp_path / "offline", record, **settings)
    expected, found = tensors(tmp_path / "offline"), tensors(after / "model")
    assert found.keys() == expected.keys()
    for tensor in expected:
        assert torch.equal(found[tensor], expected[tensor]), tensor
    configs = [moesaic.load(folder).config.to_dict() for folder in (tmp_path / "offline", after / "model")]
    names = ("num_experts", "num_experts_per_tok", "routing_rule", "expert_groups", "group_score", "model_type")
    assert [configs[0][key] for key in names] == [configs[1][key] for key in names]
    assert json.loads((tmp_path / "offline" / "moesaic.json").read_text())["experts"]["sources"] == record["sources"]


def test_the_selection_bias_of_loss_free_balancing_grows_and_takes_the_noise(tmp_path):
    out = tmp_path / "out"
    expand = {"step": STEP, "experts": 11, "utility": "uniform", "delta": 1e-2}
    run(grown_recipe(tmp_path / "in", expand, losses={"bias_balancing": 0.01}), out)
    before, after = states(out)
    (record,) = lines(out, "expansion")
    old, new = (tensors(state / "optimizer")["selection_bias"] for state in (before, after))
    assert old.shape == (2, 8)
    assert old.abs().sum() > 0
    for row, bias, sources in zip(old, new, record["sources"], strict=True):
        assert torch.equal(bias[:8], row)
        noise = bias[8:] - row[sources[8:]]
        assert 0 < noise.abs().max() < 5e-2
    routers = {name: tensor for name, tensor in tensors(after / "model").items() if name.endswith("gate.weight")}
    for (name, tensor), sources in zip(routers.items(), record["sources"], strict=True):
        assert torch.equal(tensor, tensors(before / "model")[name][sources])  # no noise on rows then

    rule = {"rule": None, "pool_size": None, "pool_draw": "document_and_layer"} | dict.fromkeys(
        ("expert_groups", "group_score")
    )
    routing = {"rule": rule, "selection_bias": old.tolist()}
    extra = {"routing": routing}
    folder = before / "model"
    write_provenance(folder, verb="train", recipe={}, seed=0, sources=[], weights_hash=None, extra=extra)
    moesaic.expand(folder, tmp_path / "offline", experts=11, utility="uniform", delta=1e-2)
    made = json.loads((tmp_path / "offline" / "moesaic.json").read_text())["routing"]
    assert torch.equal(torch.tensor(made["selection_bias"]), new)
    assert made["rule"] == rule


def test_exact_routing_with_loss_free_balancing(tmp_path):
    """Biases and router rows of the copies are their source's, and the groups of copies are chosen as it would be."""
    out = tmp_path / "out"
    expand = {"step": STEP, "experts": 13, "routing": "one_per_copy_group", "delta": 0.0}
    run(grown_recipe(tmp_path / "in", expand, losses={"bias_balancing": 0.05}), out)
    before, after = states(out)
    (record,) = lines(out, "expansion")
    old, new = (tensors(state / "optimizer")["selection_bias"] for state in (before, after))
    assert torch.equal(new, torch.stack([row[s] for row, s in zip(old, record["sources"], strict=True)]))
    assert record["statement"]["code"] == "E2"
    assert abs(record["losses"]["math"]["jump"]["value"]) < 1e-6
    assert moesaic.load(out).config.group_score == "log_mean_exp"


def naive_moments(old: dict[str, torch.Tensor], sources: list[list[int]], how: str) -> dict[str, torch.Tensor]:
    """One expert, one tensor at a time."""
    made = {}
    for name, tensor in old.items():
        moment, weight = name.split(".", 1)
        if how == "reset":
            grown = ".experts." in weight or weight.endswith("gate.weight")
            made[name] = torch.zeros(len(sources[0]) if grown else len(tensor), *tensor.shape[1:])
        elif ".experts." in weight or weight.endswith("gate.weight"):
            of_layer = sources[int(weight.split("layers.")[1].split(".")[0])]
            slots = []
            for number, source in enumerate(of_layer):
                duplicate, expert = source in of_layer[:number], ".experts." in weight
                replicas = of_layer.count(source) if how == "scale" else 1
                slot = tensor[source] / (replicas if moment == "exp_avg" else replicas * replicas)
                if duplicate and expert and how == "interpolate":
                    slot = (tensor[source] + tensor[(source + 1) % len(tensor)]) / 2
                if duplicate and expert and how == "adaptive_scale":
                    slot = tensor[source] * SHRUNK
                slots.append(slot)
            made[name] = torch.stack(slots)
        else:
            made[name] = tensor
    return made


SHRUNK = 0.5 * 0.95
"""Of `adaptive_scale`: half, less the change of 0.05 that `scaled_copy` makes to a weight."""


@pytest.mark.parametrize("how", ["reset", "copy", "scale", "adaptive_scale", "interpolate"])
def test_optimizer_state(tmp_path, how):
    out = tmp_path / "out"
    expand = {"step": STEP, "experts": 13, "optimizer": how, "expert_op": "scaled_copy"}
    run(grown_recipe(tmp_path / "in", expand), out)
    before, after = states(out)
    old, new = tensors(before / "optimizer"), tensors(after / "optimizer")
    assert any(tensor.abs().sum() > 0 for tensor in old.values())
    (record,) = lines(out, "expansion")
    assert max(max(of_layer.count(source) for source in of_layer) for of_layer in record["sources"]) > 2
    expected = naive_moments(old, record["sources"], how)
    assert new.keys() == expected.keys()
    for name in expected:
        rounding = 1e-6 * float(expected[name].abs().max()) if how in ("adaptive_scale", "interpolate") else 0
        torch.testing.assert_close(new[name], expected[name], rtol=0, atol=rounding)
    assert read_run(after).reset_step == (STEP if how == "reset" else 0)


def utility_batches(values: dict[str, Any]):
    """The batches that a gradient utility after STEP steps averages over."""
    recipe = load_recipe(TrainRecipe, values)
    data = PackedDataset(prepare(recipe.data, load_run_tokenizer(recipe), quiet=True), seed=0, sequences_per_step=4)
    return [data.batch(step) for step in range(STEP)]


def test_utilities_are_those_of_the_verb_on_the_runs_last_batches(tmp_path):
    expand = {"step": STEP, "experts": 11, "utility": "saliency", "utility_layers": "both"}
    values = grown_recipe(tmp_path / "in", expand)
    run(values, tmp_path / "out")
    before, _ = states(tmp_path / "out")
    (record,) = lines(tmp_path / "out", "expansion")
    assert record["utility_batches"] == STEP
    expected = measure(moesaic.load(before / "model"), utility_batches(values), name="model", layers="both")
    for layer, norms in expected.gradient_norms.items():
        saliency = [norm * weight for norm, weight in zip(norms, expected.weight_norms[layer], strict=True)]
        assert record["utilities"][str(layer)] == pytest.approx(saliency, rel=1e-4, abs=1e-9)
        unseen = [expert for expert, tokens in enumerate(expected.tokens[layer]) if not tokens]
        assert record["zero_token_experts"].get(str(layer), []) == unseen


def test_second_moments_is_their_trace(tmp_path):
    expand = {"step": STEP, "experts": 11, "utility": "second_moments", "utility_layers": "both"}
    run(grown_recipe(tmp_path / "in", expand), tmp_path / "out")
    before, _ = states(tmp_path / "out")
    (record,) = lines(tmp_path / "out", "expansion")
    moments = tensors(before / "optimizer")
    for layer in (0, 1):
        for expert in range(8):
            total = 0.0
            for matrix in ("gate_up_proj", "down_proj"):
                for value in (
                    moments[f"exp_avg_sq.model.layers.{layer}.mlp.experts.{matrix}"][expert].flatten().tolist()
                ):
                    total += value / (1 - 0.95**STEP)
            assert record["utilities"][str(layer)][expert] == pytest.approx(total, rel=1e-6, abs=1e-20)


@pytest.mark.parametrize(("layers", "matrices"), [("fc1", ["gate_up_proj"]), ("both", ["gate_up_proj", "down_proj"])])
def test_approx_fisher_is_the_gradient_over_the_second_moments(tmp_path, layers, matrices):
    """||g||^2 / (||v|| + 1e-8), row 3 of docs/peers.md."""
    expand = {"step": STEP, "experts": 11, "utility": "approx_fisher", "utility_layers": layers}
    values = grown_recipe(tmp_path / "in", expand)
    run(values, tmp_path / "out")
    before, _ = states(tmp_path / "out")
    (record,) = lines(tmp_path / "out", "expansion")
    moments = tensors(before / "optimizer")
    measured = measure(moesaic.load(before / "model"), utility_batches(values), name="model", layers=layers)
    for layer, norms in measured.gradient_norms.items():
        for expert, norm in enumerate(norms):
            squares = 0.0
            for matrix in matrices:
                moment = moments[f"exp_avg_sq.model.layers.{layer}.mlp.experts.{matrix}"]
                squares += sum(value * value for value in moment[expert].flatten().tolist())
            expected = norm * norm / (squares**0.5 + 1e-8)
            assert record["utilities"][str(layer)][expert] == pytest.approx(expected, rel=2e-4, abs=1e-12)


def test_what_is_recorded_of_two_expansions(tmp_path):
    expand = [
        {"fraction": 0.4, "experts": 12, "routing": "one_per_copy_group"},
        {"tokens": 3 * 128 + 1, "experts": 20, "utility": "approx_fisher", "optimizer": "copy"},
    ]
    values = grown_recipe(tmp_path / "in", expand, budget={"steps": 6}, validation={"every_steps": 1})
    values["losses"] = {"balance": {"coefficient": 0.1}}
    result = run(values, tmp_path / "out")
    first, second = lines(tmp_path / "out", "expansion")
    assert (first["step"], second["step"]) == (2, 4)
    assert (first["tokens"], first["experts_before"], first["experts"], first["top_k"]) == (256, 8, 12, 2)
    assert (second["experts_before"], second["experts"]) == (12, 20)
    assert (first["statement"]["code"], second["statement"]["code"]) == ("E2", "none")
    validations = {line["step"]: line["validation"] for line in lines(tmp_path / "out", "validation")}
    for record in (first, second):
        losses = record["losses"]["math"]
        assert losses["before"] == validations[record["step"]]["math"]
        assert losses["jump"]["value"] == pytest.approx(losses["after"]["loss"] - losses["before"]["loss"], abs=1e-9)
        assert losses["jump"]["low"] <= losses["jump"]["value"] <= losses["jump"]["high"]
    assert abs(first["losses"]["math"]["jump"]["value"]) < 1e-4  # exact but for the noise

    made = json.loads((tmp_path / "out" / "moesaic.json").read_text())
    assert [one["experts"] for one in made["expansions"]] == [12, 20]
    chained = [
        [row[source] for source in of_layer] for row, of_layer in zip(first["sources"], second["sources"], strict=True)
    ]
    assert made["experts"]["original"] == chained
    model = moesaic.load(tmp_path / "out")
    assert (model.config.num_experts, model.config.routing_rule) == (20, "one_per_group")
    assert result.validation["math"].loss == validations[6]["math"]["loss"] < validations[0]["math"]["loss"]
    assert [line["step"] for line in lines(tmp_path / "out", "step")] == list(range(1, 7))
    assert not (tmp_path / "out" / "state" / "expansion.tmp").exists()


def test_bf16_keeps_its_masters(tmp_path):
    values = grown_recipe(tmp_path / "in", {"step": STEP, "experts": 11, "utility": "uniform"}, precision="bf16")
    run(values, tmp_path / "out")
    before, after = (tensors(state / "model") for state in states(tmp_path / "out"))
    name = "model.layers.0.mlp.experts.down_proj"
    assert after[name].dtype == torch.float32
    assert torch.equal(after[name], before[name][[*range(8), 0, 1, 2]])
    assert moesaic.load(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("granitemoe", {}), ("deepseek_v3", {"losses": {}})]
)
def test_native_families_stay_what_they_are_and_resume(tmp_path, family, changes):
    source = save_tokenizer(save_tiny_moe(tmp_path / "source", family, vocab_size=VOCABULARY))
    experts = 12  # DeepSeek has 4 groups
    expand = {"step": STEP, "experts": experts, "optimizer": "scale"}
    values = grown_recipe(tmp_path / "in", expand, model=str(source), tokenizer=None, **changes)
    out = tmp_path / "out"
    run(values, out)
    made = load_file(out / "model.safetensors")
    model = moesaic.load(out)
    assert (model.config.model_type, model.config.num_local_experts) == (family, experts)
    (record,) = lines(out, "expansion")
    assert json.loads((out / "moesaic.json").read_text())["experts"]["original"] == record["sources"]
    assert sorted(made) == sorted(grown_names(source, experts))

    (out / "state" / "step-00000005" / "run.json").unlink()  # as if it had been killed after the expansion
    (out / "config.json").unlink()
    run(values, out, resume=True)
    again = load_file(out / "model.safetensors")
    assert list(again) == list(made)
    assert all(torch.equal(again[name], made[name]) for name in made)


def grown_names(source: Path, experts: int) -> list[str]:
    """The names of the hub layout with more experts."""
    moesaic.expand(source, source.parent / "expected", experts=experts)
    return list(load_file(source.parent / "expected" / "model.safetensors"))


REFUSED = {
    "expand.0: experts 8: the model has 8 experts already": {"step": 3, "experts": 8},
    "expand.0: experts 33 needs more than cap 3 .* the largest count possible is 32": {"step": 3, "experts": 33},
    "expand.0: top_k 13: there are 12 experts": {"step": 3, "experts": 12, "top_k": 13},
    "expand.0: router_op bias_only: the model has no selection bias": {
        "step": 3,
        "experts": 12,
        "router_op": "bias_only",
    },
    "expand.1: experts 12: the model has 12 experts already": [
        {"step": 2, "experts": 12},
        {"step": 3, "experts": 12},
    ],
    "expand.1: routing one_per_copy_group: the model routes to one expert per group already": [
        {"step": 2, "experts": 12, "routing": "one_per_copy_group"},
        {"step": 3, "experts": 14, "routing": "one_per_copy_group"},
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_expansions_that_cannot_work_are_refused_before_the_first_step(tmp_path, message):
    with pytest.raises(MoesaicError, match=message) as error:
        run(grown_recipe(tmp_path / "in", REFUSED[message]), tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_settings_that_contradict_the_rest_of_the_recipe(tmp_path):
    exact = {"step": 3, "experts": 12, "routing": "one_per_copy_group"}
    for message, changes in (
        ("one_per_copy_group: routing.rule topk would go on", {"expand": exact, "routing": {"rule": "topk"}}),
        (
            "utility gradient_norm needs gradients, but optimizer.frozen freezes experts",
            {"optimizer": {"lr": 1e-2, "frozen": ["*.experts.*"]}},
        ),
        (
            r"routing.pool_size: \[2, 3\] does not fit 4 active of 12 routed experts",
            {
                "expand": {"step": 3, "experts": 12, "top_k": 4},
                "routing": {"rule": "document_pool", "pool_size": [2, 3]},
            },
        ),
        ("'llama' is not an MoE family", {"model": {"family": "llama", "config": DENSE}, "losses": {}}),
    ):
        values = grown_recipe(tmp_path / "in", {"step": 3, "experts": 12}) | changes
        with pytest.raises(MoesaicError, match=f"expand.0: .*{message}"):
            run(values, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_utilities_that_are_all_zero_stop_the_run_and_leave_the_state_before(tmp_path, monkeypatch):
    norms = growth_utility._norms

    def zero(trainable, found, layers):
        measured = norms(trainable, found, layers).items()
        return {layer: tuple(0.0 for _ in values) if layer else values for layer, values in measured}

    monkeypatch.setattr(growth_utility, "_norms", zero)
    values = grown_recipe(tmp_path / "in", {"step": STEP, "experts": 12})
    match = (
        r"step 3: expand\.0: the model: the utilities of all experts of layer 1 are 0 .*last good state .*step-00000003"
    )
    with pytest.raises(MoesaicError, match=match):
        run(values, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    result = run(values, tmp_path / "out", resume=True)  # and it goes on from there
    assert result.steps == 5
    run(values, tmp_path / "whole")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_what_may_change_on_resume(tmp_path):
    out, first = tmp_path / "out", {"step": STEP, "experts": 12, "utility": "uniform"}
    run(grown_recipe(tmp_path / "in", first), out)
    longer = {"budget": {"steps": 8}}
    for message, expand in (
        ("was done after step 3 and is missing now", []),
        ("was done after step 3 and would be after step 4 now", {**first, "step": 4}),
        ("was done after step 3 with other settings", {**first, "experts": 13}),
        ("expand.1: is after step 4, but this run is at step 5", [first, {"step": 4, "experts": 16}]),
    ):
        with pytest.raises(MoesaicError, match=message):
            run(grown_recipe(tmp_path / "in", expand, **longer), out, resume=True)
    more = [{**first, "step": None, "tokens": 3 * 128}, {"step": 5, "experts": 16, "utility": "uniform"}]
    run(grown_recipe(tmp_path / "in", more, **longer), out, resume=True)
    assert [line["experts"] for line in lines(out, "expansion")] == [12, 16]
    assert moesaic.load(out).config.num_experts == 16
