"""Progress: what is printed where, and how amounts are written."""

import doctest
import io
import re
import threading
from contextlib import contextmanager

import pytest

from moesaic.common import progress as module
from moesaic.common.progress import amount, duration, notice, progress, status, warn


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_examples():
    assert doctest.testmod(module).failed == 0


def test_lines_outside_a_terminal_are_rare_and_on_stderr(clock, capsys):
    with progress(100e6, label="writing") as tick:
        for _ in range(100):
            clock.now += 0.11
            tick(1e6)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "moesaic: writing: 46% (46.0 MB of 100.0 MB), 6 s left, 9.1 MB/s",
        "moesaic: writing: 92% (92.0 MB of 100.0 MB), 1 s left, 9.1 MB/s",
        "moesaic: writing: 100% (100.0 MB of 100.0 MB), 9.1 MB/s",
    ]


def test_short_work_prints_nothing(clock, capsys):
    with progress(3, "layers", label="reading") as tick:
        clock.now += 1
        tick(3)
    assert capsys.readouterr() == ("", "")


def test_quiet_prints_nothing(clock, capsys):
    with progress(3, "layers", label="reading", quiet=True) as tick:
        clock.now += 60
        tick(3)
    notice("hello", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_notice_and_warning_go_to_stderr(capsys):
    notice("hello")
    warn("odd")
    assert capsys.readouterr() == ("", "moesaic: hello\nmoesaic: warning: odd\n")


def test_failed_work_does_not_look_complete(clock, capsys):
    def fail():
        with progress(2, "layers", label="reading") as tick:
            clock.now += 6
            tick(1)
            clock.now += 6
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 (raised just above)
        fail()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_bar_on_a_terminal_shows_rate_and_time_left(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(10, "layers", label="[red]writing") as tick:
        clock.now += 2
        tick(4)
        notice("a message in between")
    text = terminal.getvalue()
    assert "[red]writing" in text  # no markup is interpreted
    assert "40% (4 layers of 10 layers), 3 s left, 2 layers/s" in text
    assert "moesaic: a message in between\n" in text


@pytest.mark.parametrize("label", ["training", "checking the sources"])
def test_a_bar_is_one_line_of_80_characters_with_what_matters(monkeypatch, label):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    long = "step 123,456/999,999: loss 2.3456, 12 h 34 min left, 123,456 tokens/s, gradient 0.123, lr 0.000123"
    size = status(123e9, 987e9, 100.0, "B")
    with module.bar(label, 10) as show:
        show(5, long if label == "training" else size)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]
    (shown,) = {line.rstrip() for line in lines if " left" in line}
    assert len(shown) <= 80
    assert "loss 2.3456, 12 h 34 min left" in shown or "12% (123.0 GB of 987.0 GB), 11 min 42 s left" in shown


def test_dumb_terminal_gets_lines(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with progress(None, "tokens", label="reading") as tick:
        clock.now += 10
        tick(5000)
    assert terminal.getvalue() == "moesaic: reading: 5,000 tokens, 500 tokens/s\n"


def test_ticks_of_several_threads_add_up(monkeypatch, capsys):
    monkeypatch.setattr(module, "LINE_SECONDS", 0.001)
    with progress(4000, "steps", label="x") as tick:
        threads = [threading.Thread(target=lambda: [tick(1) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "100% (4,000 steps of 4,000 steps)" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (0.5, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1e6, "1.0 MB"),
        (5e9, "5.0 GB"),
        (2.5e12, "2.5 TB"),
        (1e18, "1000.0 PB"),
    ],
)
def test_amount_of_bytes(value, text):
    assert amount(value) == text


def test_nothing_done_yet():
    assert status(0, 10, 0.0, "layers") == "0% (0 layers of 10 layers), 0 layers/s"
    assert status(0, 0, 0.0, "B") == "0 B, 0 B/s"


def test_duration_rounds_before_it_splits():
    assert duration(59.7) == "1 min 0 s"


def test_training_shows_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, capsys, clock):
    from moesaic.training.metrics import Console

    timing = {"seconds": 1.0, "tokens_per_second": 4096.0, "flops_per_second": 2e9}
    lines = [{"step": step, "loss": 5.0 - step, "grad_norm": 0.5, "lr": 1e-3, "timing": timing} for step in (1, 2)]
    console = Console(steps=2, first=0, quiet=False)
    for line in lines:
        console.step(line)
    console.close()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "moesaic: step 1/2: loss 4.0000, 1 s left, 4,096 tokens/s, gradient 0.5, lr 0.001, 2.0 GFLOP/s"
    )
    assert last.startswith("moesaic: step 2/2: loss 3.0000")

    shown, closed = [], []

    @contextmanager
    def bar(label, total):
        yield lambda done, text: shown.append((label, total, done, text))
        closed.append(label)

    monkeypatch.setattr("moesaic.training.metrics.on_terminal", lambda: True)
    monkeypatch.setattr("moesaic.training.metrics.bar", bar)
    console = Console(steps=2, first=0, quiet=False)
    for line in lines:
        console.step(line)
    with console.validating(4, 2) as tick:
        clock.now += 1
        tick(1)
    console.close()
    assert capsys.readouterr().err == ""
    assert shown.pop() == ("training", 2, 2, "held-out 25% (1 batches of 4 batches), 3 s left, 1 batches/s")
    assert [part[:3] for part in shown] == [("training", 2, 1), ("training", 2, 2)]
    assert "step 2/2: loss 3.0000" in shown[1][3]
    assert closed == ["training"]
