"""How many threads a conversion takes where the user does not say. No torch."""

import os

MOST_WORKERS = 8
"""More threads than this wait for the disk."""


def default_workers() -> int:
    """One thread per core that this process may use, at most `MOST_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)
