"""The ranks of a run: who they are, what they share, and sums over them. One process needs no torch.distributed."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.distributed.configuration_utils import DistributedConfig

from moesaic.errors import MoesaicError
from moesaic.training.recipe import ParallelRecipe, Precision


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all. Every rank sees different sequences."""

    rank: int
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

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def join_world(parallel: ParallelRecipe) -> World:
    """Meet the other ranks that torchrun started.

    Raises: `MoesaicError` where their number is not what the recipe divides the work among.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    wanted = parallel.fsdp * parallel.replicate
    if size != wanted:
        raise MoesaicError(
            f"parallel.fsdp * parallel.replicate = {wanted}, but {size} process{'es were' if size > 1 else ' was'} "
            f"started: run under `torchrun` with {wanted} processes in all, or change `parallel`"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(rank=rank, size=size, replicas=parallel.replicate, device=device)


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
