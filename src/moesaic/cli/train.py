"""`moesaic train`."""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Json, Quiet
from moesaic.cli.output import print_result

NAME = "train"
USAGE = "Usage: moesaic train RECIPE OUT [OPTIONS]"
EXAMPLE = """Examples:
  moesaic train recipe.yaml ./run --set optimizer.lr=1e-3 --set budget.steps=500
  moesaic train recipe.yaml ./run --resume
  torchrun --nproc-per-node 8 -m moesaic train recipe.yaml ./run --set parallel.fsdp=8
"""


def command(
    recipe: Annotated[str, Parameter(help="Training recipe: a YAML file, or a name from `moesaic recipes list`.")],
    out: Annotated[Path, Parameter(help="Folder of the checkpoint, the metrics and the run state.")],
    /,
    *,
    settings: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set", help="A key of the recipe and its value, repeatable.", metavar="KEY=VALUE", show_default=False
        ),
    ] = (),
    resume: Annotated[
        bool, Parameter(help="Go on with the run in OUT; start fresh where there is nothing to resume.")
    ] = False,
    overwrite: Annotated[bool, Parameter(help="Remove the run or checkpoint in OUT first.")] = False,
    dry_run: Annotated[
        bool, Parameter(help="Check the recipe and say what the run would need, but train nothing.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a dense or mixture-of-experts model: continued, from scratch, annealing or fine-tuning.

    OUT ends as a plain checkpoint; OUT/metrics.jsonl has a line per step and per validation. SIGTERM saves the run's
    state and leaves with status 143. Under torchrun all ranks get the same command.
    """
    from moesaic.training.recipe import load_train_recipe

    loaded = load_train_recipe(recipe, settings)
    is_main = os.environ.get("RANK", "0") == "0"
    if dry_run:
        from moesaic.training.folder import refuse_content, refuse_overlap, require_local_files
        from moesaic.training.planning import plan_train

        refuse_overlap(Path(out), loaded)
        refuse_content(Path(out), resume=resume, overwrite=overwrite)
        require_local_files(loaded)
        report = plan_train(loaded, subject=recipe)
        print_result(() if quiet else report.lines(), report.to_dict(), as_json=json)
        return
    from moesaic.training.run import train

    result = train(loaded, out, resume=resume, overwrite=overwrite, quiet=quiet)
    if is_main:
        print_result(() if quiet else result.lines, result.summary, as_json=json)
