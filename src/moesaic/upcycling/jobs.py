"""The work of a conversion, cut into independent jobs that stream blocks from source files into the output's places.

Bytes that only move are never seen by floating-point code. E experts, M shards, I and F widths, D hidden, S shared.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.families.dense import RowRange
from moesaic.upcycling.assemble import router_rows, scaled_expert
from moesaic.upcycling.experts import ExpertWeights
from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.method import BASE
from moesaic.upcycling.reinit import fresh_blocks
from moesaic.upcycling.sources import DiskSources, read_rows, row_blocks, shard_rows
from moesaic.upcycling.stream import Target

_MEAN_BLOCK_BYTES = 512 << 10
"""In float64 four times that for bf16: a block and its sum stay in the second-level cache."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One independent piece of work, for any thread, at any time."""

    nbytes: int
    """What it writes; large ones are started first."""
    run: Callable[[], None]


def jobs(plan: UpcyclePlan, target: Target) -> list[Job]:
    """All jobs of a conversion; together they write every element of the output once."""
    sizes = {tensor.name: tensor.nbytes for tensor in plan.files.tensors}

    def job(function: Callable[..., None], *arguments: object, writes: tuple[str, ...]) -> Job:
        present = sum(sizes.get(name, 0) for name in writes)
        return Job(nbytes=present, run=partial(function, plan, target, *arguments))

    made = [job(_carry, name, sources, writes=(name,)) for name, sources in plan.carried.items()]
    for layer in plan.moe_layers:
        mlp = f"model.layers.{layer}.mlp."
        gate_up, down = f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"
        made.append(job(_router, layer, mlp, writes=(f"{mlp}gate.weight",)))
        if plan.layer.method.copies is None:
            made.append(job(_made_experts, layer, mlp, writes=(gate_up, down)))
        else:
            made.append(job(_copied_gate_up, layer, mlp, writes=(gate_up, f"{gate_up}_bias")))
            made.append(job(_copied_down, layer, mlp, writes=(down, f"{down}_bias")))
        if plan.layer.shared_experts:
            shared = tuple(f"{mlp}shared_expert.{part}_proj.weight" for part in ("gate", "up", "down"))
            made.append(job(_shared_experts, layer, mlp, writes=shared))
    return sorted(made, key=lambda one: -one.nbytes)


# --- everything that is no expert -------------------------------------------------------------------------------------


def _carry(plan: UpcyclePlan, target: Target, name: str, sources: tuple[TensorInfo, ...]) -> None:
    if not sources:
        for start, values in fresh_blocks(plan, name):
            target.put(name, start, values)
    elif len(sources) == 1:
        target.copy_rows(whole(sources[0]), name, 0)
    else:
        for start, mean in mean_blocks(sources):
            target.put(name, start, mean)


def whole(info: TensorInfo) -> RowRange:
    """All rows of a tensor."""
    return RowRange(info=info, start=0, stop=info.shape[0])


def mean_blocks(sources: tuple[TensorInfo, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yield the mean of tensors of one shape in float64, by blocks of rows: (number of the first element, mean).

    A sum of up to 2^29 equal float32 values is exact in float64, so the mean of equal tensors is that tensor.
    """
    row = sources[0].shape[1] if len(sources[0].shape) > 1 else 1
    for start, stop in row_blocks(whole(sources[0]), _MEAN_BLOCK_BYTES):
        total = read_tensor(sources[0], start, stop).double()
        for other in sources[1:]:
            total += read_tensor(other, start, stop)
        yield start * row, total.div_(len(sources))


def _router(plan: UpcyclePlan, target: Target, layer: int, mlp: str) -> None:
    target.put(f"{mlp}gate.weight", 0, router_rows(plan.layer, layer))


# --- experts ----------------------------------------------------------------------------------------------------------


def _made_experts(plan: UpcyclePlan, target: Target, layer: int, mlp: str) -> None:
    """Experts that are computed, one at a time."""
    shards = plan.layer.shards
    sources = DiskSources(ffns=plan.ffns(layer), shards=shards, output_dtype=TORCH_DTYPES[plan.dtype])
    for number in range(plan.layer.experts):
        # Nothing of an expert is kept while the next one is made.
        _put_expert(target, mlp, number, scaled_expert(plan.layer, layer, number, sources))


def _put_expert(target: Target, mlp: str, number: int, expert: ExpertWeights) -> None:
    width, hidden = expert.gate_ID.shape
    row = 2 * width * number
    target.put(f"{mlp}experts.gate_up_proj", row * hidden, expert.gate_ID)
    target.put(f"{mlp}experts.gate_up_proj", (row + width) * hidden, expert.up_ID)
    target.put(f"{mlp}experts.down_proj", number * hidden * width, expert.down_DI)
    if expert.gate_bias_I is not None and expert.up_bias_I is not None and expert.down_bias_D is not None:
        target.put(f"{mlp}experts.gate_up_proj_bias", row, expert.gate_bias_I)
        target.put(f"{mlp}experts.gate_up_proj_bias", row + width, expert.up_bias_I)
        target.put(f"{mlp}experts.down_proj_bias", number * hidden, expert.down_bias_D)


def _copied_gate_up(plan: UpcyclePlan, target: Target, layer: int, mlp: str) -> None:
    """Gate and up rows of experts that are shards: a shard's rows lie together in source and output."""
    spec, ffns = plan.layer, plan.ffns(layer)
    width, hidden, factor = spec.expert.intermediate, spec.expert.hidden, spec.factors.gate_up
    assert spec.method.copies is not None
    for number in range(spec.experts):
        source, shard = spec.method.copies(number, spec.shards)
        ffn = ffns[source]
        for half, (weight, bias) in enumerate(((ffn.gate, ffn.gate_bias), (ffn.up, ffn.up_bias))):
            row = (2 * number + half) * width
            rows = shard_rows(weight, shard, spec.shards)
            target.copy_rows(rows, f"{mlp}experts.gate_up_proj", row * hidden, factor)
            if bias is not None:
                rows = shard_rows(bias, shard, spec.shards)
                target.copy_rows(rows, f"{mlp}experts.gate_up_proj_bias", row, factor)


def _copied_down(plan: UpcyclePlan, target: Target, layer: int, mlp: str) -> None:
    """Down columns of experts that are shards: each block of a source's rows is read once and cut into its shards."""
    spec, name = plan.layer, f"{mlp}experts.down_proj"
    width, hidden, factor = spec.expert.intermediate, spec.expert.hidden, spec.factors.down
    assert spec.method.copies is not None
    users: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in range(spec.experts):
        source, shard = spec.method.copies(number, spec.shards)
        users[source].append((number, shard))
    for source, experts in users.items():
        ffn = plan.ffns(layer)[source]
        for start, stop in row_blocks(ffn.down):
            block = target.convert(read_tensor(ffn.down.info, start, stop), name, factor)
            for number, shard in experts:
                columns = block[:, shard * width : (shard + 1) * width].contiguous()
                target.put(name, (number * hidden + start) * width, columns)
        if ffn.down_bias is not None:
            bias = read_rows(ffn.down_bias).to(torch.float32) / spec.shards * factor
            for number, _ in experts:
                target.put(f"{name}_bias", number * hidden, bias)


def _shared_experts(plan: UpcyclePlan, target: Target, layer: int, mlp: str) -> None:
    """S copies of the base's FFN side by side: one FFN of width S*F."""
    if plan.shared_weights == "reinit":
        for name in (tensor.name for tensor in plan.files.tensors if tensor.name.startswith(f"{mlp}shared_expert.")):
            for start, values in fresh_blocks(plan, name):
                target.put(name, start, values)
        return
    copies, factor, ffn = plan.layer.shared_experts, plan.layer.factors.shared_down, plan.ffns(layer)[BASE]
    for part, weight, bias in (("gate", ffn.gate, ffn.gate_bias), ("up", ffn.up, ffn.up_bias)):
        width, hidden = weight.stop - weight.start, weight.info.shape[1]
        for copy in range(copies):
            target.copy_rows(weight, f"{mlp}shared_expert.{part}_proj.weight", copy * width * hidden)
            if bias is not None:
                target.copy_rows(bias, f"{mlp}shared_expert.{part}_proj.bias", copy * width)
    name = f"{mlp}shared_expert.down_proj.weight"
    for start, stop in row_blocks(ffn.down):
        block = target.convert(read_tensor(ffn.down.info, start, stop), name, factor)
        target.put(name, start * copies * block.shape[1], block.repeat(1, copies))
    if ffn.down_bias is not None:
        bias = read_rows(ffn.down_bias).to(torch.float32) * factor
        target.put(f"{mlp}shared_expert.down_proj.bias", 0, torch.stack([bias] * copies).sum(0))
