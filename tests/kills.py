"""kill -9 at random moments that hit unfinished work on any machine, also where its speed changes meanwhile."""

import random
from collections.abc import Callable


def at_random_moments(attempt: Callable[[float], bool], seconds: float, count: int) -> int:
    """Call `attempt(delay)`, which kills after that delay and says whether the work was unfinished.

    `count` times, and on, to ten times as often, until half of `count` kills hit unfinished work; the longest delay
    starts at `seconds` and follows what the machine does. Returns how many hit unfinished work.
    """
    moments = random.Random(0)
    attempts = unfinished = 0
    while attempts < count or (unfinished < count / 2 and attempts < 10 * count):
        hit = attempt(moments.uniform(0, seconds))
        attempts += 1
        unfinished += hit
        seconds *= 1.1 if hit else 0.8
    return unfinished
