"""The ranks of a run: who they are, what they share, and sums over them. One process needs no torch.distributed."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.configuration_utils import DistributedConfig

from moesaic.common.errors import MoesaicError
from moesaic.training.recipe import ParallelRecipe, Precision

ResultT = TypeVar("ResultT")

_PATIENCE = timedelta(hours=12)
"""How long ranks wait for each other: the first start tokenises the corpus, and an expansion writes the model, in one
process. `torchrun` ends the others as soon as one fails."""

_LOST = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|remote process exited", re.IGNORECASE
)
"""What gloo and NCCL say, in plain RuntimeErrors, when a process that they talk to is no more."""


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all. Every rank sees different sequences."""

    rank: int
    local_rank: int
    """Number on its machine."""
    size: int
    replicas: int
    """Copies of the sharded model among the ranks."""
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on at least one rank."""
        return bool(self.sum(torch.tensor(int(flag), device=self.device))) if self.size > 1 else flag

    def from_local_main(self, make: Callable[[], ResultT]) -> ResultT:
        """Call `make` once on each machine and give its (pickled) result there, or its MoesaicError to all."""
        return self._shared(make, self.rank - self.local_rank)

    def from_main(self, make: Callable[[], ResultT]) -> ResultT:
        """Call `make` on the main rank and give its (pickled) result to all, or raise its MoesaicError on all."""
        return self._shared(make, 0)

    def _shared(self, make: Callable[[], ResultT], maker: int) -> ResultT:
        """The result of the rank that makes it for this one, which calls `make` itself if that is its own number."""
        if self.size == 1:
            return make()
        outcome: tuple[ResultT | None, MoesaicError | None] = None, None
        if self.rank == maker:
            try:
                outcome = make(), None
            except MoesaicError as error:
                outcome = None, error
        made = [outcome] * self.size
        dist.all_gather_object(made, outcome)
        for _, refusal in made:
            if refusal is not None:
                raise refusal
        return made[maker][0]  # pyright: ignore[reportReturnType]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined_world(parallel: ParallelRecipe) -> Iterator[World]:
    """Meet the other ranks that torchrun started, and part from them at the end.

    Raises: `MoesaicError` where their number is not what the recipe divides the work among.
    """
    size, rank, local_rank = (
        int(os.environ.get(name, default))
        for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))
    )
    wanted = parallel.fsdp * parallel.replicate
    if size != wanted:
        raise MoesaicError(
            f"parallel.fsdp * parallel.replicate = {wanted}, but {size} process{'es were' if size > 1 else ' was'} "
            f"started: run under `torchrun` with {wanted} processes in all, or change `parallel`"
        )
    if parallel.cpu_offload and not torch.cuda.is_available():
        raise MoesaicError("parallel.cpu_offload: true, but there is no CUDA device whose memory it would spare")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    meeting = size > 1 and not dist.is_initialized()
    if meeting:
        backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"  # gloo for what is offloaded to the CPU
        dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield World(rank=rank, local_rank=local_rank, size=size, replicas=parallel.replicate, device=device)
    except RuntimeError as error:
        if size > 1 and (words := _LOST.search(str(error))):
            raise MoesaicError(
                f"rank {rank} lost another rank of this run ({words[0]}): see what that one said; "
                "--resume goes on from the last state"
            ) from error
        raise
    finally:
        if meeting:
            dist.destroy_process_group()


def distributed_config(parallel: ParallelRecipe, precision: Precision) -> DistributedConfig | None:
    """What transformers shards a model by; `None` for one process."""
    if parallel.fsdp * parallel.replicate == 1:
        return None
    return DistributedConfig(
        fsdp_size=parallel.fsdp,
        ep_size=parallel.expert,
        dp_replicate_size=parallel.replicate,
        fsdp_cpu_offload=parallel.cpu_offload,
        fsdp_mixed_precision=precision == "bf16",
    )


def reshard(model: nn.Module) -> None:
    """Give up weights that a forward pass without backward left gathered.

    Until then the model holds these copies in the place of its shards, and would go on with them after the shards have
    changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank, which all call this; without gradient."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
