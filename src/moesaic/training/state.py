"""Run state on disk: OUT/state/step-00000500/, complete or absent, written and read by any number of ranks.

    model/       fp32 weights with config.json: one plain file, or the parts of the ranks; transformers loads either
    optimizer/   moments of AdamW, and what routing remembers between steps
    run.json     step, length of the metrics, validation loss, recipe

torch.distributed.checkpoint cuts tensors into the shards of the ranks that write and pastes them into those of the
ranks that read, so a run may go on with another `parallel`. Nothing is pickled. The data position and all random
numbers are functions of the recipe's seed and the step, so the step is all of them.
"""

import json
import shutil
import warnings
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moesaic.checkpoint.headers import read_header
from moesaic.checkpoint.pio import sync_path
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained, load_json
from moesaic.common.recipe import Count, load_document
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.training.folder import RUN_FILE, UNFINISHED, list_states
from moesaic.training.optimizer import MOMENTS, kept_in_fp32
from moesaic.training.parallel import World, whole
from moesaic.training.start import Trainable

_FILE_BYTES = 64 << 20
_BEFORE = "remove the folder of this state to go on from the one before"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What run.json holds: where a run stands after `step` steps."""

    step: Count
    """Optimizer steps done."""
    metrics_bytes: Count
    """Length of metrics.jsonl at that moment."""
    validation: dict[str, DomainLoss] | None
    """Losses of the held-out sets by domain, if they were measured after this very step."""
    recipe: dict[str, Any]
    """The resolved recipe as plain values."""
    data: list[str]
    """What identifies the content of every source, and how it was tokenised."""
    held_out: list[str] | None = None
    """The same of the held-out sources, set by set; `None` in states of earlier versions."""
    expansions: list[dict[str, Any]] = field(default_factory=list)
    """What was recorded of each expansion that the model has gone through."""
    reset_step: Count = 0
    """Steps done that the moments of AdamW are not made of."""

    @property
    def name(self) -> str:
        """Of its folder; right after an expansion, another than just before, and later in order."""
        expanded = bool(self.expansions) and self.expansions[-1]["step"] == self.step
        return f"step-{self.step:08d}{'-expanded' if expanded else ''}"

    @property
    def mean_loss(self) -> float | None:
        """Mean over the held-out sets."""
        losses = [measured.loss for measured in (self.validation or {}).values()]
        return sum(losses) / len(losses) if losses else None


def read_run(state: Path) -> RunState:
    """What run.json of a state says."""
    file = state / RUN_FILE
    return load_document(RunState, load_json(file), str(file), way_out=_BEFORE)


def save_state(folder: Path, run: RunState, trainable: Trainable) -> None:
    """Write one state aside, sync it and rename it; all ranks call this with their shards.

    Raises: `MoesaicError` for a full disk and other failures of the disk. The states before stay as they are.
    """
    world = trainable.world
    final = folder / run.name
    aside = final.with_name(final.name + UNFINISHED)
    with explained(final):
        if world.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        world.barrier()
        _write(weights_of(trainable), aside / "model", world)
        _write(optimizer_tensors_of(trainable), aside / "optimizer", world)
        world.barrier()
        if world.is_main:
            trainable.config.save_pretrained(aside / "model")
            (aside / RUN_FILE).write_text(json.dumps(asdict(run), indent=2), encoding="utf-8")
            for name in ("model/config.json", RUN_FILE, "model", "optimizer", "."):
                sync_path(aside / name)
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
            sync_path(folder)
        world.barrier()


def prune_states(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` states and the best one."""
    states = list_states(folder)
    losses = {state: loss for state in states if (loss := read_run(state).mean_loss) is not None}
    best = min(losses, key=losses.__getitem__, default=None)
    for state in states[:-keep]:
        if state != best:
            (state / RUN_FILE).unlink()  # from here on it counts as unfinished
            shutil.rmtree(state, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed run was writing or removing."""
    complete = list_states(folder)
    for path in folder.glob("step-*"):
        if path not in complete:
            shutil.rmtree(path, ignore_errors=True)


def _write(tensors: Mapping[str, Tensor], folder: Path, world: World) -> None:
    if world.is_main:
        folder.mkdir()
    world.barrier()
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_files_of(tensors), save_distributed=world.size > 1
    )
    chunks = {name: _contiguous(tensor) for name, tensor in tensors.items()}
    try:
        with _one_process_is_meant():
            save(chunks, storage_writer=writer, no_dist=world.size == 1)
    except CheckpointException as error:  # no subclass of Exception, and what happened is inside
        raise next(failure for failure, _ in error.failures.values()) from error


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number, from 1, of the file that each tensor goes into: a file is made up in memory before it is written."""
    files: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in tensors.items():
        if size and size + tensor.nbytes > _FILE_BYTES:
            number, size = number + 1, 0
        files[name], size = number, size + tensor.nbytes
    return files


@torch.no_grad()
def read_tensors(tensors: Mapping[str, Tensor], folder: Path, world: World) -> None:
    """Read tensors by name from the safetensors files of a folder into what is there, each rank its shards.

    Raises:
        MoesaicError: a file that is damaged, or lacks one of the tensors.
    """
    _refuse_damaged(tensors, folder)
    chunks = {name: _contiguous(tensor) for name, tensor in tensors.items()}
    try:
        with _one_process_is_meant():
            load(chunks, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=world.size == 1)
    except CheckpointException as error:  # no subclass of Exception, and what happened is inside
        failure = next(failure for failure, _ in error.failures.values())
        reason = " ".join(str(failure).split())[:300]
        raise MoesaicError(f"{folder}: cannot be read ({type(failure).__name__}: {reason}); {_BEFORE}") from error
    for name, tensor in tensors.items():
        chunk = chunks[name]
        if isinstance(tensor, DTensor) and isinstance(chunk, DTensor):
            tensor.to_local().copy_(chunk.redistribute(placements=tensor.placements).to_local())


def _refuse_damaged(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Look at all headers first: torch prints tracebacks."""
    held: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            held |= read_header(file).keys()
        except MoesaicError as error:
            raise MoesaicError(f"{str(error).rpartition(';')[0] or error}; {_BEFORE}") from error
    if missing := sorted(tensors.keys() - held):
        raise MoesaicError(f"{folder}: has no tensor {missing[0]!r}; {_BEFORE}")


def _contiguous(tensor: Tensor) -> Tensor:
    """The same values in shards that checkpoint files can describe: one run of rows per rank.

    FSDP on top of expert parallelism leaves strided shards, which DCP would store in the wrong order.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    plain = tuple(Shard(place.dim) if isinstance(place, _StridedShard) else place for place in tensor.placements)
    return tensor if plain == tensor.placements else tensor.redistribute(placements=plain)


@contextmanager
def _one_process_is_meant() -> Iterator[None]:
    """Silence what torch says where there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# --- the tensors of a run ---------------------------------------------------------------------------------------------


def weights_of(trainable: Trainable) -> dict[str, Tensor]:
    """fp32 weights (frozen ones as the model has them) and persistent buffers, by name."""
    return {**trainable.masters.parameters, **trainable.buffers()}


def gather(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, *, keep: bool, uncast: Container[str] = ()
) -> dict[str, Tensor]:
    """Whole tensors on the CPU, where `keep`; every rank has to call this.

    In `dtype`, but for integers and the names in `uncast`, which stay as they are.
    """
    gathered = {}
    for name, tensor in tensors.items():
        detached = tensor.detach()
        cast = detached.to(dtype) if tensor.is_floating_point() and name not in uncast else detached
        entire = whole(cast)
        if keep:
            gathered[name] = entire.cpu()
    return gathered


def result_of(trainable: Trainable, dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor]:
    """The weights as the run computed with them, whole, where `keep`; every rank has to call this.

    Parameters are in `dtype`. Buffers, such as a family's selection bias, are never cast in training, and not here.
    """
    uncast = {*trainable.buffers(), *kept_in_fp32(trainable.model)}
    return gather(weights_of(trainable), dtype, keep=keep, uncast=uncast)


def optimizer_tensors_of(trainable: Trainable) -> dict[str, Tensor]:
    """Moments by parameter name, and the selection bias of loss-free balancing."""
    state = trainable.optimizer.state
    tensors = {
        f"{moment}.{name}": state[parameter][moment]
        for name, parameter in trainable.masters.trainable.items()
        for moment in MOMENTS
    }
    installation = trainable.installation
    if installation is not None and installation.selection_bias is not None:
        tensors["selection_bias"] = installation.selection_bias
    return tensors


def restore(trainable: Trainable, state: Path, updates: int) -> None:
    """Put a state that was saved in the place of what is there; `updates` are those that its moments are made of."""
    read_tensors(weights_of(trainable), state / "model", trainable.world)
    read_tensors(optimizer_tensors_of(trainable), state / "optimizer", trainable.world)
    set_updates(trainable, updates)
    trainable.masters.publish()


def set_updates(trainable: Trainable, updates: int) -> None:
    """Say how many updates the moments are made of, which AdamW corrects them for."""
    for moments in trainable.optimizer.state.values():
        moments["step"].fill_(updates)
