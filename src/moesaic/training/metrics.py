"""What a run says: metrics.jsonl with a line per step and per validation, trackers, and lines for people."""

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from moesaic.checkpoint.metrics import METRICS_FILE
from moesaic.common.files import explained
from moesaic.common.numbers import finite_only, shown
from moesaic.common.progress import BAR_SECONDS, LINE_SECONDS, Meter, Tick, bar, duration, notice, on_terminal
from moesaic.families.costs import flops_per_token
from moesaic.modeling.cross_entropy import DomainLoss
from moesaic.routing.stats import busiest_share, dead_experts, load_entropy
from moesaic.training.planning import PEAK_FLOPS
from moesaic.training.recipe import Tracker
from moesaic.training.start import Trainable
from moesaic.training.step import StepResult
from moesaic.training.trackers import start_trackers


class MetricsLog:
    """Appends to OUT/metrics.jsonl, and gives the numbers to trackers.

    Lines differ between two runs of one recipe in `timing` only. On a rank that isn't the main one, nothing is written.
    """

    def __init__(
        self, out: Path, *, start_bytes: int, start_step: int, trackers: Sequence[Tracker], active: bool
    ) -> None:
        """Cut the file to `start_bytes`, what it had when the state of `start_step` was saved."""
        self._file = None
        self._trackers: list[Any] = []
        if not active:
            return
        self._trackers = start_trackers(trackers, out, start_step)
        self._path = out / METRICS_FILE
        with explained(self._path):
            self._file = self._path.open("ab")
            self._file.truncate(min(start_bytes, self._path.stat().st_size))  # truncate would also lengthen it

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line; `line["step"]` counts from 1."""
        if self._file is None:
            return
        with explained(self._path):
            self._file.write(json.dumps(finite_only(line), allow_nan=False).encode() + b"\n")
            self._file.flush()
        for tracker in self._trackers:
            tracker.log(dict(_scalars(line)), step=line["step"])

    def sync(self) -> int:
        """Make the file durable; return its length in bytes."""
        if self._file is None:
            return 0
        with explained(self._path):
            os.fsync(self._file.fileno())
            return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file and the trackers."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.finish()


def _scalars(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and name != "step":
            yield prefix + name, value


# --- the lines --------------------------------------------------------------------------------------------------------


class Throughput:
    """Turns tokens and seconds into FLOP/s and, where the device's peak is known, model FLOPs utilisation."""

    def __init__(self, trainable: Trainable) -> None:
        """Backward counts as twice the forward (the usual 3x); recomputation does not count."""
        recipe, world = trainable.recipe, trainable.world
        shapes = {name: tuple(weight.shape) for name, weight in trainable.masters.parameters.items()}
        config = trainable.config.get_text_config().to_dict()
        self._flops = 3 * flops_per_token(shapes, config, recipe.data.sequence_length)
        peak = None
        if world.device.type == "cuda" and recipe.precision == "bf16":
            peak = peak_flops(torch.cuda.get_device_name(world.device))
        self._peak = None if peak is None else peak * world.size

    def line(self, tokens: int, seconds: float) -> dict[str, float]:
        """The `timing` of a step; `tokens` are positions, padding included."""
        rate = tokens / seconds
        timing = {"seconds": seconds, "tokens_per_second": rate, "flops_per_second": rate * self._flops}
        return timing if self._peak is None else timing | {"mfu": rate * self._flops / self._peak}


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name that CUDA gives it; None for one that is not in the table."""
    words = re.split(r"[\s-]+", device_name)
    return next((flops for name, flops in PEAK_FLOPS.items() if name in words), None)


def step_line(
    result: StepResult, *, step: int, tokens: int, rate: float, domains: Sequence[str], timing: Mapping[str, float]
) -> dict[str, Any]:
    """The line of one step. Everything but `timing` is the same in every run of a recipe on one kind of machine.

    `tokens` are the positions up to and with this step. Of the experts: entropy of the load over log E (mean over the
    layers), the largest share of a layer's selections that one expert took, and how many took none, over all layers.
    """
    losses = zip(domains, result.domain_losses, strict=True)
    line: dict[str, Any] = {
        "kind": "step",
        "step": step,
        "tokens": tokens,
        "loss": result.loss,
        "domain_loss": {domain: loss for domain, loss in losses if not math.isnan(loss)},
        "grad_norm": result.gradient_norm,
        "lr": rate,
        "step_tokens": result.tokens,
    }
    for name in ("balance_loss", "router_z_loss", "lm_z_loss"):
        if (value := getattr(result, name)) is not None:
            line[name] = value
    if result.load is not None:
        counts_LE = result.load.counts_LE
        line["load_entropy"] = float(load_entropy(counts_LE).mean())
        line["largest_share"] = float(busiest_share(counts_LE).max())
        line["dead_experts"] = int(dead_experts(counts_LE).sum())
    return line | {"timing": dict(timing)}


class Console:
    """A live bar on a terminal; lines on stderr elsewhere: the first step, the last, and every few seconds."""

    def __init__(self, *, steps: int, first: int, quiet: bool) -> None:
        self._steps, self._first, self._quiet = steps, first, quiet
        self._shown = time.monotonic()
        self._seconds = 0.0
        self._open = ExitStack()
        self._bar = self._open.enter_context(bar("training", steps)) if on_terminal() and not quiet else None

    def step(self, line: Mapping[str, Any]) -> None:
        """Show a step if it is time to."""
        now, step = time.monotonic(), line["step"]
        self._seconds += line["timing"]["seconds"]
        pause = LINE_SECONDS if self._bar is None else BAR_SECONDS
        if step not in (self._first + 1, self._steps) and now - self._shown < pause:
            return
        self._shown = now
        left = self._seconds / (step - self._first) * (self._steps - step)  # of steps, without validation
        text = f"step {step:,}/{self._steps:,}: {_figures(line, duration(left))}"
        if self._bar is None:
            notice(text, quiet=self._quiet)
        else:
            self._bar(step, text)

    def close(self) -> None:
        """Remove the bar."""
        self._open.close()

    @contextmanager
    def validating(self, batches: int, step: int) -> Iterator[Tick]:
        """Show how far a validation is, where the steps are shown; gives `tick(batches just done)`."""

        def show(_done: float, text: str) -> None:
            if self._bar is None:
                notice(f"step {step:,}: held-out {text}", quiet=self._quiet)
            else:
                self._bar(step, f"held-out {text}")

        interval = LINE_SECONDS if self._bar is None else BAR_SECONDS
        yield Meter(total=batches, unit="batches", show=show, interval=interval).tick

    def validation(self, measured: Mapping[str, DomainLoss], step: int) -> None:
        """Show a validation."""
        losses = ", ".join(f"{domain} {shown(loss.loss, '.4f')}" for domain, loss in measured.items())
        notice(f"step {step:,}: held-out {losses}", quiet=self._quiet)


def _figures(line: Mapping[str, Any], left: str) -> str:
    """What matters most first: a narrow terminal has no room for the end."""
    timing = line["timing"]
    flops = f"{timing['flops_per_second'] / 1e9:,.1f} GFLOP/s"
    if "mfu" in timing:
        flops += f" ({100 * timing['mfu']:.1f}% of peak)"
    loss = "no loss (nothing is predicted)" if line["loss"] is None else f"loss {line['loss']:.4f}"
    speed = f"{timing['tokens_per_second']:,.0f} tokens/s"
    return f"{loss}, {left} left, {speed}, gradient {line['grad_norm']:.3g}, lr {line['lr']:.3g}, {flops}"
