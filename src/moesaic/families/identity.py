"""Which model experts belong to: the identity that statistics and selections are checked against, and the lineage of a
subset, through extraction and fine-tuning. Torch-free.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from moesaic.checkpoint.pio import read_into
from moesaic.checkpoint.record import PROVENANCE_FILE, read_provenance
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.recipe import Count, Size, load_document
from moesaic.families.moe import MoEModel

_SAMPLE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """Name, shape and hashes of an MoE checkpoint."""

    name: str
    revision: str | None
    model_type: str
    num_experts: Size
    top_k: Size
    num_groups: Size
    """Groups of group-limited selection (DeepSeek, GLM), 1 elsewhere; each keeps equally many experts."""
    layers: tuple[Count, ...]
    """The MoE layers, by their index in the model."""
    sample_hash: str
    """See `sample_hash`."""

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise MoesaicError(f"num_groups {self.num_groups} does not divide its num_experts, {self.num_experts}")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"layers": list(self.layers)}


def describe(checkpoint: Checkpoint, model: MoEModel) -> SourceModel:
    """The identity of a checkpoint; reads a sample of each tensor."""
    return SourceModel(
        name=checkpoint.name,
        revision=checkpoint.revision,
        model_type=str(checkpoint.config["model_type"]),
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_groups=group_count(checkpoint.config, model),
        layers=tuple(layer.layer for layer in model.layers),
        sample_hash=sample_hash(checkpoint),
    )


def sample_hash(checkpoint: Checkpoint) -> str:
    """xxh3 (128 bits, hex) over name, dtype and shape of every tensor and the first 4 KiB of it.

    Of a tensor with three dimensions or more (stacked experts), of each of its slots. Any training changes it, and so
    does putting back a single expert; reading whole checkpoints only to compare them would cost more than cutting them.
    """
    state = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_SAMPLE_BYTES))
    tensors = checkpoint.stored or checkpoint.tensors  # of a quantised one always the bytes in the files
    for name in sorted(tensors):
        info = tensors[name]
        state.update(json.dumps([name, info.dtype, list(info.shape)]).encode())
        slots = info.shape[0] if len(info.shape) >= 3 else 1
        slot_bytes = info.nbytes // max(slots, 1)
        sample = buffer[: min(_SAMPLE_BYTES, slot_bytes)]
        with explained(info.file):
            fd = os.open(info.file, os.O_RDONLY)
        try:
            for slot in range(slots):
                read_into(fd, sample, info.offset + slot * slot_bytes, info.file)
                state.update(sample)
        finally:
            os.close(fd)
    return state.hexdigest()


def group_count(config: Mapping[str, Any], model: MoEModel) -> int:
    """Number of groups among which the router chooses first; 1 where it does not."""
    keys = model.family.group_keys
    # "greedy" is DeepSeek-V2's name for plain top-k: the groups are then in the config, but unused.
    if keys is None or config.get("topk_method") == "greedy":
        return 1
    return int(config.get(keys[0]) or 1)


def shared_count(config: Mapping[str, Any], model: MoEModel) -> int:
    """Shared experts of each MoE layer: as the config says, one where it has none of the usual keys but tensors."""
    counts = [int(config[key]) for key in ("num_shared_experts", "n_shared_experts") if config.get(key) is not None]
    return counts[0] if counts else int(any(layer.shared for layer in model.layers))


def refuse_other_model(made_for: SourceModel, given: SourceModel, where: str) -> None:
    """Refuse a model other than the one that `where` was made for: by shape, then by the hash of the weights."""
    for key in ("model_type", "num_experts", "layers", "num_groups"):
        wanted, found = getattr(made_for, key), getattr(given, key)
        if wanted != found:
            raise MoesaicError(
                f"{where}: was made for {made_for.name} with {key} {wanted}, but {given.name} has {found}; "
                "select again on this model"
            )
    if made_for.sample_hash != given.sample_hash:
        raise MoesaicError(
            f"{where}: was made for {made_for.name} with other weights (hash {made_for.sample_hash[:12]}) than "
            f"{given.name} has (hash {given.sample_hash[:12]}); select again on this model"
        )


# --- the way from a subset back to the models that its experts are from ----------------------------------------------

Ids = tuple[tuple[int, ...], ...]
"""Expert ids per MoE layer."""

Lineage = tuple[tuple[SourceModel, Ids], ...]
"""The ids that a subset's experts have in each of its ancestors, the nearest ancestor first."""


def find_lineage(checkpoint: Checkpoint) -> Lineage:
    """The record of `extract` in moesaic.json, which training hands on; empty for a model that is no subset."""
    record = read_provenance(checkpoint.path) or {}
    where = str(checkpoint.path / PROVENANCE_FILE)
    ancestors = load_document(_Lineage, record, where, others=True, way_out="extract the subset again").lineage
    for number, one in enumerate(ancestors):
        least = {len(one.ids)} == {len(one.model.layers)} and min((len(row) for row in one.ids), default=0)
        if not least or any(expert >= one.model.num_experts for row in one.ids for expert in row):
            raise MoesaicError(f"{where}: lineage.{number}.ids does not fit its model; extract the subset again")
    return tuple((one.model, one.ids) for one in ancestors)


@dataclass(frozen=True, kw_only=True)
class _Ancestor:
    model: SourceModel
    ids: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True, kw_only=True)
class _Lineage:
    """What moesaic.json says of a subset."""

    lineage: tuple[_Ancestor, ...] = ()
