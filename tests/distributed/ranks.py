"""Several processes as torchrun would start them, on one machine, forked from a server that has torch imported."""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from typing import Any


def start_ranks(size: int, function: Callable[..., None], *args: Any) -> list[Any]:
    """Call `function(*args)` in `size` processes, and return them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moesaic.training.run", "torch.utils.tensorboard", "torch.distributed.fsdp"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=_rank, args=(rank, size, port, function, args)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def run_ranks(size: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(*args)` in `size` processes; all must end well. A hang ends with the test's own time limit."""
    processes = start_ranks(size, function, *args)
    try:
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes):
                break  # one failed: the others would wait for it
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * size, codes


def _rank(rank: int, size: int, port: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    function(*args)
