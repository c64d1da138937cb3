"""kill -9 at random points of some work, on any machine and beside any other: at the n-th call, not after n seconds."""

import itertools
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_calls(die_at: int | None = None) -> Callable[[], int]:
    """Count the calls of Python from now on, in this thread and in new ones; at number `die_at` the process dies.

    Returns a function that gives their number so far. Not undone: for a process that only does the work.
    """
    numbers, last = itertools.count(1), [0]

    def profile(_frame: FrameType, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            last[0] = next(numbers)
            if last[0] == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(profile)
    sys.setprofile(profile)
    return lambda: last[0]


def at_random_calls(attempt: Callable[[int], object], calls: int, count: int) -> None:
    """Call `attempt(number)`, which kills some work at that call of the `calls` that it makes, `count` times."""
    moments = random.Random(0)
    for _ in range(count):
        attempt(moments.randint(1, calls))
