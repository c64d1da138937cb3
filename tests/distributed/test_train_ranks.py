"""Two and four processes against one: the same losses, the same tensors after saving and loading, no hang on uneven
experts, and an end for all where one is killed."""

import json
import os
import signal
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.training import run as run_module
from moesaic.training import session
from moesaic.training.optimizer import MOMENTS
from moesaic.training.parallel import World
from moesaic.training.recipe import TrainRecipe
from moesaic.training.state import gather, list_states, optimizer_tensors_of, read_tensors, weights_of
from tests.distributed.ranks import run_ranks, start_ranks
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe

STEPS = 30
LAYOUTS = {
    "fsdp": {"fsdp": 2},
    "fsdp and experts": {"fsdp": 2, "expert": 2},
    "replicas": {"fsdp": 1, "replicate": 2},
    "two replicas of two shards": {"fsdp": 2, "replicate": 2},
    "experts on four ranks": {"fsdp": 4, "expert": 4},
    "experts on two of four ranks": {"fsdp": 4, "expert": 2},
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def values(tmp_path_factory) -> dict[str, Any]:
    """Balancing over the step, pools and selection biases; one rank takes 4 sequences at a time, two take 1 each."""
    return tiny_recipe(
        tmp_path_factory.mktemp("in"),
        routing={"rule": "document_pool", "pool_size": [2, 6]},
        losses={"balance": {"coefficient": 0.1, "scope": "step"}, "router_z": 0.001, "bias_balancing": 0.001},
        optimizer={"lr": 1e-3, "warmup_steps": 5},
        batch={"tokens": 256, "micro_sequences": 4},
        budget={"steps": STEPS},
        checkpoint={"every_steps": 15},
    )


@pytest.fixture(scope="module")
def one_process(values, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("one") / "out"
    train(values, out)
    return out


def on_ranks(values: dict[str, Any], parallel: dict[str, int]) -> dict[str, Any]:
    return values | {"parallel": parallel, "batch": values["batch"] | {"micro_sequences": 1}}


def train(values: dict[str, Any], out: Path) -> None:
    run_module.train(load_recipe(TrainRecipe, values), out, resume=True, quiet=True)


def train_and_dump(values: dict[str, Any], out: Path, dump: Path) -> None:
    """Train, then write every tensor of the last state, whole, as this process group has it in memory."""
    finish = run_module._finish

    def dumping(run, quiet):
        tensors = weights_of(run.trainable) | optimizer_tensors_of(run.trainable)
        whole = gather(tensors, torch.float32, keep=True)
        if run.world.is_main:
            save_file({name: tensor.clone() for name, tensor in whole.items()}, dump)
        finish(run, quiet)

    run_module._finish = dumping
    train(values, out)


def losses(out: Path) -> torch.Tensor:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "step"]
    names = ("loss", "balance_loss", "router_z_loss", "grad_norm")
    return torch.tensor([[line[name] for name in names] for line in kept], dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_follow_one_process(values, one_process, tmp_path, layout):
    out, dump = tmp_path / "out", tmp_path / "dump.safetensors"
    run_ranks(
        prod(LAYOUTS[layout].get(axis, 1) for axis in ("fsdp", "replicate")),
        train_and_dump,
        on_ranks(values, LAYOUTS[layout]),
        out,
        dump,
    )
    assert len(losses(out)) == STEPS
    torch.testing.assert_close(losses(out), losses(one_process), rtol=0, atol=1e-5)

    expected = load_file(dump)  # saved by all, loaded by one
    moments = {name for name in expected if name.split(".")[0] in (*MOMENTS, "selection_bias")}
    weights = {name: torch.zeros_like(expected[name]) for name in expected.keys() - moments}
    optimizer = {name: torch.zeros_like(expected[name]) for name in moments}
    state = list_states(out / "state")[-1]
    world = World(rank=0, local_rank=0, size=1, replicas=1, device=torch.device("cpu"))
    read_tensors(weights, state / "model", world)
    read_tensors(optimizer, state / "optimizer", world)
    final = load_file(out / "model.safetensors")
    bias = {name for name in final if name.endswith(".e_score_correction_bias")}  # in a run's states: selection_bias
    assert final.keys() - bias == weights.keys()
    assert len(bias) == 2
    for name, tensor in (weights | optimizer).items():
        assert torch.equal(tensor, expected[name]), name
        assert name in moments or torch.equal(tensor, final[name]), name
    assert sum(".experts." in name for name in final) == 4


def test_two_processes_go_on_with_the_run_of_one_and_back(values, one_process, tmp_path):
    out = tmp_path / "out"
    train(values | {"budget": {"steps": STEPS}, "checkpoint": {"every_steps": 5}}, out)
    for state in list_states(out / "state")[-1:]:
        (state / "run.json").unlink()  # as if it had been killed before the last state
    (out / "config.json").unlink()
    run_ranks(2, train, on_ranks(values, LAYOUTS["fsdp and experts"]) | {"checkpoint": {"every_steps": 5}}, out)
    torch.testing.assert_close(losses(out), losses(one_process), rtol=0, atol=1e-5)


def train_with_disjoint_experts(values: dict[str, Any], out: Path) -> None:
    """Let all tokens of rank r choose two experts that live on the other rank."""
    build = session.build_trainable

    def biased(recipe, out, world, **keywords):
        trained = build(recipe, out, world, **keywords)
        assert trained.installation is not None
        bias = trained.installation.selection_bias
        assert bias is not None
        first = 0 if world.rank else 6
        bias[:, first : first + 2] = 1e3
        return trained

    session.build_trainable = biased
    train(values, out)


def test_ranks_with_disjoint_experts_do_not_hang(values, tmp_path):
    short = on_ranks(values, LAYOUTS["fsdp and experts"]) | {"budget": {"steps": 3}, "optimizer": {"lr": 1e-3}}
    short |= {"routing": {}, "losses": values["losses"] | {"bias_balancing": 1e-9}}
    run_ranks(2, train_with_disjoint_experts, short, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["dead_experts"] for line in steps] == [2 * 4] * 3  # 4 of 8 in both layers
    assert [line["largest_share"] for line in steps] == [0.25] * 3


def test_a_selection_bias_of_the_family_is_not_rounded_under_fsdp(values, tmp_path):
    base = save_tiny_moe(tmp_path / "base", "deepseek_v3", dtype=torch.bfloat16)
    save_tokenizer(base)
    tensors = load_file(base / "model.safetensors")
    (name,) = (name for name in tensors if "e_score_correction_bias" in name)
    tensors[name] = 8 + torch.linspace(0, 0.02, 8)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    short = on_ranks(values, LAYOUTS["fsdp"]) | {"model": str(base), "tokenizer": None, "precision": "bf16"}
    short |= {"budget": {"steps": 1}, "optimizer": {"lr": 1e-3}, "routing": {}, "losses": {}}
    run_ranks(2, train, short, tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(result[name], tensors[name])
    assert {tensor.dtype for other, tensor in result.items() if other != name} == {torch.bfloat16}


def lose_the_last(values: dict[str, Any], out: Path, said: Path) -> None:
    """Kill the last rank in step 2; the others write what they were told."""
    step = run_module.run_step

    def dying(trainable, batches, **keywords):
        if keywords["step"] == 2 and os.environ["RANK"] == "3":
            os.kill(os.getpid(), signal.SIGKILL)
        return step(trainable, batches, **keywords)

    run_module.run_step = dying
    try:
        train(values, out)
    except MoesaicError as error:
        (said / os.environ["RANK"]).write_text(str(error))
        raise SystemExit(3) from None


def test_a_killed_rank_ends_the_others_with_one_line(values, tmp_path):
    said = tmp_path / "said"
    said.mkdir()
    processes = start_ranks(4, lose_the_last, on_ranks(values, {"fsdp": 4, "expert": 2}), tmp_path / "out", said)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [3, 3, 3, -signal.SIGKILL]
    lines = {file.name: file.read_text() for file in said.iterdir()}
    assert lines.keys() == {"0", "1", "2"}
    for rank, line in lines.items():
        assert line.startswith(f"rank {rank} lost another rank of this run (")
        assert "\n" not in line
