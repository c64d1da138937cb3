"""`moesaic eval` against lm-eval alone: the same model, rows, batch size and machine, one after the other.

    python benchmarks/evaluate.py CHECKPOINT DATA_DIR [--limit 40]

Both build their tasks, load the model once and ask it the same questions; starting Python and importing are in neither
time. lm-eval puts the questions of all tasks into common batches, we those of one task, so in bfloat16 the numbers can
differ by rounding; with `--dtype float32` they should not.
"""

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any, cast

from moesaic.evaluation import harness
from moesaic.evaluation.benchmarks import BENCHMARKS
from moesaic.evaluation.evaluate import evaluate
from moesaic.evaluation.local import read_local
from moesaic.evaluation.recipe import EvalRecipe
from moesaic.loading import load, load_tokenizer

TASKS = ("arc_easy", "openbookqa", "piqa")


def alone(checkpoint: Path, data: Path, limit: int, batch_size: int, dtype: str) -> tuple[float, dict[str, float]]:
    """lm-eval's `simple_evaluate` on its own task objects, all tasks in one call."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    started = time.monotonic()
    tasks: list[Any] = []
    for name in TASKS:
        local = read_local(name, BENCHMARKS[name], data, shots=0)
        tasks += harness.build(name, BENCHMARKS[name], shots=0, seed=EvalRecipe.seed, local=local).values()
    make, run = cast(Any, HFLM), cast(Any, lm_eval.simple_evaluate)  # decorators hide their signatures
    model = make(pretrained=load(checkpoint, dtype=dtype), tokenizer=load_tokenizer(checkpoint), batch_size=batch_size)
    found = run(model=model, tasks=tasks, limit=limit, log_samples=False)
    return time.monotonic() - started, {name: found["results"][name]["acc,none"] for name in TASKS}


def ours(
    checkpoint: Path, data: Path, limit: int, batch_size: int, dtype: str
) -> tuple[float, dict[str, float | None]]:
    """`moesaic.evaluate`, hash of the checkpoint included."""
    started = time.monotonic()
    found = evaluate(checkpoint, suite=",".join(TASKS), data_dir=data, limit=limit, batch_size=batch_size, dtype=dtype)
    return time.monotonic() - started, {name: found.score(name) for name in TASKS}


def main() -> None:
    """Measure both, alternating, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    settings = (arguments.checkpoint, arguments.data, arguments.limit, arguments.batch_size, arguments.dtype)
    harness.require_lm_eval()
    import lm_eval.models.huggingface  # noqa: F401  # neither pays for the import

    with contextlib.redirect_stderr(io.StringIO()):
        alone(*settings[:2], 1, *settings[3:])  # files into the page cache, kernels chosen
        seconds_ours, scores_ours = ours(*settings)
        seconds_alone, scores_alone = alone(*settings)
    print(
        json.dumps(
            {
                "lm-eval alone, s": round(seconds_alone, 2),
                "moesaic eval, s": round(seconds_ours, 2),
                "ratio": round(seconds_ours / seconds_alone, 3),
                "same numbers": scores_ours == scores_alone,
                "scores": scores_ours,
                "scores of lm-eval": scores_alone,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
