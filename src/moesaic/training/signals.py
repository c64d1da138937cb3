"""SIGTERM as a request: the step under way ends, the state is saved, then the process leaves."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATED = 128 + signal.SIGTERM
"""Exit status of a run that saved its state because of SIGTERM; not 0, because the run isn't over."""


@contextmanager
def termination_flag() -> Iterator[threading.Event]:
    """Give an event that SIGTERM sets. In a thread other than the main one, which gets no signals, nothing sets it."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    before = signal.signal(signal.SIGTERM, lambda *_: flag.set())
    try:
        yield flag
    finally:
        signal.signal(signal.SIGTERM, before)
