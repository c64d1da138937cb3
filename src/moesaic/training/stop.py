"""Signals that stop a run between two steps, after its state was saved."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_STOPPED: Mapping[int, tuple[str, Callable[[], BaseException]]] = {
    signal.SIGTERM: ("SIGTERM", lambda: SystemExit(128 + signal.SIGTERM)),
    signal.SIGINT: ("Ctrl-C", KeyboardInterrupt),
}
"""Signal -> its name in messages, and how a run leaves once it has saved: never as if it were over."""

_WILL_SAVE = b"\nmoesaic: saving after this step; Ctrl-C again ends at once, without\n"


@dataclass(kw_only=True)
class Stop:
    """Which signal has asked the run to stop, if one has."""

    by: int | None = None

    @property
    def name(self) -> str:
        """Of the signal; on a rank that got none, another one did."""
        return "a signal" if self.by is None else _STOPPED[self.by][0]

    def leave(self) -> BaseException:
        """What to raise when the state is saved."""
        return _STOPPED[self.by or signal.SIGTERM][1]()


@contextmanager
def stopping(*, alone: bool, quiet: bool) -> Iterator[Stop]:
    """Let SIGTERM and Ctrl-C ask for a stop; a second Ctrl-C raises KeyboardInterrupt where it arrives.

    Not so where other ranks are (`alone` is false): torchrun sends each Ctrl-C of the terminal once more, and ends its
    processes by itself. In a thread other than the main one, which gets no signals, nothing asks.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and stop.by == number and alone:
            raise KeyboardInterrupt
        if number == signal.SIGINT and stop.by is None and not quiet:
            os.write(2, _WILL_SAVE)  # print may be what the signal has interrupted
        stop.by = number

    before = {number: signal.signal(number, ask) for number in _STOPPED}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
