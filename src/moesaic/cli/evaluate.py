"""`moesaic eval`."""

from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Device, DryRun, Dtype, Json, Quiet
from moesaic.cli.output import print_result

NAME = "eval"
USAGE = "Usage: moesaic eval CHECKPOINT --out results.json [--suite NAME|FILE] [--data-dir DIR] [OPTIONS]"
EXAMPLE = """Examples:
  moesaic eval ./moe --suite emo-mc9 --data-dir ./evals --out moe.results.json
  moesaic eval ./moe --suite arc_easy,piqa --shots 0 --limit 200 --data-dir ./evals --out quick.json
  moesaic eval ./moe --suite perplexity --data-dir ./corpus --out text.json
  moesaic eval ./moe --suite mmlu-categories --selection ./selections --data-dir ./evals --out subset.json

Suites: divmoe15, divmoe8, emo-mc9, emo-gen5, mmlu-categories, mmlu-pro, gsm8k, perplexity.
"""


def command(
    checkpoint: Annotated[str, Parameter(help="Folder or hub id org/name[@revision], with a tokenizer.")],
    *,
    out: Annotated[str, Parameter(help="Results file; a second call goes on where the first one stopped.")],
    suite: Annotated[str, Parameter(help="Suite or task, several with commas between, or a YAML file.")] = "emo-mc9",
    data_dir: Annotated[str | None, Parameter(help="Folder with local rows [default: the hub's data sets].")] = None,
    shots: Annotated[int | None, Parameter(help="Demonstrations, for all tasks [default: the suite's].")] = None,
    limit: Annotated[int | None, Parameter(help="First rows of each task, subject or domain [default: all].")] = None,
    selection: Annotated[
        str | None, Parameter(help="Use only the experts of this selection, or of a folder with one per category.")
    ] = None,
    selection_share: Annotated[
        float | None, Parameter(help="Share of the rows that selections are made on, not evaluated [default: suite's].")
    ] = None,
    seed: Annotated[int, Parameter(help="Seed of the demonstrations that are drawn.")] = 1234,
    batch_size: Annotated[int, Parameter(help="Texts at once; more is faster and needs more memory.")] = 8,
    device: Device = None,
    dtype: Dtype = "auto",
    domain_field: Annotated[
        str, Parameter(help="perplexity: the records' field with the domain; '' takes the file's name.")
    ] = "domain",
    allow_code_execution: Annotated[
        bool, Parameter(help="humaneval, mbpp: run the programs that the model writes, without network.")
    ] = False,
    overwrite: Annotated[bool, Parameter(help="Begin the results file anew.")] = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a checkpoint, dense or MoE, on benchmarks (through lm-eval) and on held-out text."""
    from moesaic.evaluation.evaluate import evaluate

    result = evaluate(
        checkpoint,
        out,
        suite=suite,
        data_dir=data_dir,
        shots=shots,
        limit=limit,
        selection=selection,
        selection_share=selection_share,
        seed=seed,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        domain_field=domain_field,
        allow_code_execution=allow_code_execution,
        overwrite=overwrite,
        dry_run=dry_run,
        quiet=quiet,
    )
    print_result(() if quiet else result.lines(), result.to_dict(), as_json=json)
