"""How many threads a conversion takes. No torch."""

import os

from moesaic.common.errors import MoesaicError

MOST_WORKERS = 8
"""More threads than this wait for the disk."""


def default_workers() -> int:
    """One thread per core that this process may use, at most `MOST_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def check_workers(workers: int | None) -> int | None:
    """Return the number of threads asked for (None: let the conversion choose)."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise MoesaicError(f"--workers: must be a whole number of at least 1, got {workers!r}")
    return workers
