"""Experiment trackers by name, those of accelerate: the numbers of metrics.jsonl go to each of them as well."""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moesaic.common.errors import MoesaicError
from moesaic.training.recipe import Tracker

_STARTED_WITH: Mapping[Tracker, Callable[[Path, int], dict[str, Any]]] = {
    "tensorboard": lambda out, step: {
        "run_name": "tensorboard",
        "logging_dir": out / "state",
        "purge_step": step + 1,
    },
    "wandb": lambda out, _: {
        "run_name": os.environ.get("WANDB_PROJECT", "moesaic"),
        "name": out.name,
        "dir": str(out / "state"),
    },
    "mlflow": lambda out, _: {"experiment_name": "moesaic", "run_name": out.name},
}
"""Tracker, which is also its package -> what accelerate's class for it is told of a run that goes on after a step."""


def chosen_trackers(names: Iterable[Tracker] | None) -> list[Tracker]:
    """The trackers of a recipe, or by default TensorBoard where it is installed.

    Raises:
        MoesaicError: one that is named is not installed.
    """
    if names is None:
        return [name for name in ("tensorboard",) if _missing(name) is None]
    for name in names:
        if (package := _missing(name)) is not None:
            raise MoesaicError(f"trackers: {name} needs {package}, which is not installed; pip install {package}")
    return list(dict.fromkeys(names))


def _missing(name: Tracker) -> str | None:
    return next((package for package in ("accelerate", name) if find_spec(package) is None), None)


def start_trackers(names: Iterable[Tracker], out: Path, step: int) -> list[Any]:
    """Start trackers for a run that goes on after `step`; each has `log(values, step=)` and `finish()`.

    Raises:
        MoesaicError: one does not start, such as for want of a login.
    """
    started = []
    for name in names:
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        threads = torch.get_num_threads()
        try:
            PartialState()  # without it accelerate cannot log; among several ranks it may take other threads
            tracker = LOGGER_TYPE_TO_CLASS[name](**_STARTED_WITH[name](out, step))
            tracker.start()
        except Exception as error:
            for one in started:
                one.finish()
            raise MoesaicError(f"trackers: {name} does not start: {type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(threads)
        started.append(tracker)
    return started
