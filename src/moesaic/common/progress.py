"""Progress and messages, all of it on stderr: stdout belongs to results.

A live bar on a terminal, plain lines at most every few seconds elsewhere (a log file, a CI job), nothing when quiet.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tick = Callable[[float], None]

LINE_SECONDS = 5.0  # between two plain lines
BAR_SECONDS = 0.1  # between two updates of the live bar
_BAR_WIDTH = 10
_PREFIXES = ("", "k", "M", "G", "T", "P")


def notice(message: str, *, quiet: bool = False) -> None:
    """Tell the user something worth knowing that is no mistake; nothing is printed when quiet."""
    if not quiet:
        print(f"moesaic: {message}", file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Tell the user about something that is probably not wanted; printed even when quiet."""
    print(f"moesaic: warning: {message}", file=sys.stderr, flush=True)


def on_terminal() -> bool:
    """Whether stderr is a terminal that can show a live bar."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(total: float | None, unit: str = "B", *, label: str, quiet: bool = False) -> Iterator[Tick]:
    """Show how far some work is, with rate and time left; gives `tick(n)`, to be called with the amount just done.

    `total` is the amount of all the work (None: unknown). `unit` is "B" for bytes (shown as kB, MB, GB) or any plural
    noun, such as "tokens". `tick` may be called from several threads.
    """
    if quiet:
        yield lambda _amount: None
        return
    live = on_terminal()
    with (bar if live else _lines)(label, total) as show:
        meter = Meter(total=total, unit=unit, show=show, interval=BAR_SECONDS if live else LINE_SECONDS)
        yield meter.tick
        meter.finish()


class Meter:
    """Adds up what was done and calls `show(done, text)` at most once per interval."""

    def __init__(self, *, total: float | None, unit: str, show: Callable[[float, str], None], interval: float):
        self._total, self._unit, self._show, self._interval = total, unit, show, interval
        self._done = self._shown = 0.0
        self._start = self._shown_at = time.monotonic()
        self._lock = threading.Lock()

    def tick(self, amount: float) -> None:
        """Add an amount just done."""
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if now - self._shown_at >= self._interval:
                self._shown_at, self._shown = now, self._done
                self._show(self._done, status(self._done, self._total, now - self._start, self._unit))

    def finish(self) -> None:
        """Show the end, unless it was shown already or the work was too short for anything to have been shown."""
        if self._shown_at > self._start and self._shown < self._done:
            elapsed = time.monotonic() - self._start
            self._show(self._done, status(self._done, self._total, elapsed, self._unit))


@contextmanager
def _lines(label: str, _total: float | None) -> Iterator[Callable[[float, str], None]]:
    yield lambda _done, text: notice(f"{label}: {text}")


@contextmanager
def bar(label: str, total: float | None) -> Iterator[Callable[[float, str], None]]:
    """Show a live bar on stderr; gives `show(done, text)`. Messages that are printed meanwhile appear above it.

    It is one line: of a text that is too long for the terminal the last parts between commas are left out.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.fields[text]}", markup=False),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task(label, total=total, text="")

        def show(done: float, text: str) -> None:
            room = console.width - len(label) - _BAR_WIDTH - 2
            live.update(task, completed=done, text=fitting(text, room))

        yield show


def fitting(text: str, room: int) -> str:
    """As many of the first parts between commas as there is room for, one at least.

    >>> fitting("step 1,000, loss 2.5, 12 s left", 25)
    'step 1,000, loss 2.5'
    """
    while len(text) > room and ", " in text:
        text = text.rpartition(", ")[0]
    return text


def status(done: float, total: float | None, seconds: float, unit: str) -> str:
    """Say amount, rate and time left in one line.

    >>> status(2_500_000_000, 10_000_000_000, 5.0, "B")
    '25% (2.5 GB of 10.0 GB), 15 s left, 500.0 MB/s'
    >>> status(3, None, 2.0, "layers")
    '3 layers, 1.5 layers/s'
    """
    rate = done / seconds if seconds > 0 else 0.0
    speed = f"{amount(rate, unit)}/s"
    if not total:
        return f"{amount(done, unit)}, {speed}"
    parts = [f"{100 * done / total:.0f}% ({amount(done, unit)} of {amount(total, unit)})"]
    if done < total and rate > 0:
        parts.append(f"{duration((total - done) / rate)} left")
    return ", ".join([*parts, speed])


def amount(value: float, unit: str = "B") -> str:
    """Write an amount: bytes in powers of 1000, other units as they are.

    >>> amount(1_234_000), amount(12), amount(3.25, "layers")
    ('1.2 MB', '12 B', '3.2 layers')
    """
    if unit != "B":
        return f"{value:,.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.1f} {unit}"
    power = min(len(_PREFIXES) - 1, int(math.log10(value) // 3)) if value >= 1 else 0
    return f"{value / 1000**power:.{1 if power else 0}f} {_PREFIXES[power]}B"


def duration(seconds: float) -> str:
    """Write a time span.

    >>> duration(15.2), duration(200), duration(7300)
    ('15 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Silence the bars that transformers shows while it loads a model; they know nothing of quiet."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
