"""`moesaic lab`."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from moesaic.cli.options import DryRun, Json, Quiet
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.common.files import check_file
from moesaic.common.yaml_text import parse_yaml

_SEEDS = 3
_TASKS = ("prepare", "measure", "premise", "accuracy", "subsets", "pools", "inspected")
"""Functions of `data` and `tasks`: the keywords are the settings; they give rows, or None."""

app = App(
    name="lab",
    help="Run the papers' claims as small experiments.",
    help_format="plaintext",
    help_epilogue="""Examples:
  moesaic lab list
  moesaic lab run emo ./emo-tiny --scale tiny --jobs 2
  moesaic lab report ./emo-tiny ./expand-tiny --html report.html
""",
)


@app.command(name="list", usage="Usage: moesaic lab list [OPTIONS]")
def list_experiments(*, json: Json = False, quiet: Quiet = False) -> None:  # noqa: ARG001 (every verb takes quiet)
    """List the experiments and the scales."""
    from moesaic_lab.experiments import EXPERIMENTS
    from moesaic_lab.scale import SCALES, load_scale

    width = max(map(len, EXPERIMENTS))
    lines = [f"{name:<{width}}  {one.question}" for name, one in EXPERIMENTS.items()]
    scales: dict[str, Any] = {}
    for name in SCALES:
        scale = load_scale(name)
        said = [scale.undecided, scale.description] if scale.undecided else [scale.description]
        lines += ["", f"--scale {name}: {said[0]}", *said[1:]]
        sizes = {}
        for experiment, one in EXPERIMENTS.items():
            active, tokens = one.size(scale)
            minutes = _SEEDS * one.minutes(scale)
            sizes[experiment] = {"tokens_per_active_parameter": tokens / active, "minutes": minutes}
            lines.append(
                f"  {experiment:<{width}}  {tokens / active:5.1f} tokens per active parameter, about {minutes:,.0f} "
                f"minutes of one core with {_SEEDS} seeds"
            )
        scales[name] = {"description": scale.description, "undecided": scale.undecided, "experiments": sizes}
    document = {"experiments": {name: one.question for name, one in EXPERIMENTS.items()}, "scales": scales}
    print_result(lines, document, as_json=json)


@app.command(name="run", usage="Usage: moesaic lab run NAME OUT [OPTIONS]")
def run(
    name: Annotated[str, Parameter(help="An experiment from `moesaic lab list`.")],
    out: Annotated[Path, Parameter(help="Folder of everything that the experiment makes.")],
    /,
    *,
    data: Annotated[
        Path | None,
        Parameter(help="Folder with DOMAIN.train.jsonl and DOMAIN.valid.jsonl [default: generated domains]."),
    ] = None,
    scale: Annotated[str, Parameter(help="tiny, small, papers, or a YAML file.")] = "tiny",
    seeds: Annotated[int, Parameter(help="Repetitions of everything with other random numbers.")] = _SEEDS,
    jobs: Annotated[int, Parameter(help="Processes at once, one thread each.")] = 1,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment, or what is left of one that was stopped.

    OUT gets every recipe (recipes/), every command (commands.sh), all runs, the numbers (results.jsonl) and the tables
    (report.md).
    """
    from moesaic_lab.workflow import run_experiment

    finding = run_experiment(name, out, data=data, scale=scale, seeds=seeds, jobs=jobs, dry_run=dry_run, quiet=quiet)
    print_result(() if quiet else finding.lines, finding.summary, as_json=json)


@app.command(name="report", usage="Usage: moesaic lab report OUT... [OPTIONS]")
def report(
    *outs: Annotated[Path, Parameter(name="OUT", help="Folders of experiments, finished or not.")],
    html: Annotated[Path | None, Parameter(help="Also write one HTML file with tables and plots.")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write results.jsonl and report.md of experiments again, and print the tables."""
    from moesaic_lab.report import find, markdown, write_html

    if not outs:
        raise MoesaicError("OUT is needed: the folder of an experiment")
    if html is not None:
        check_file(html, replaces="moesaic lab")
    findings = [find(out) for out in outs]
    if html is not None:
        write_html(findings, html)
    lines = [line for finding in findings for line in markdown(finding)]
    document = {"experiments": [{"out": str(one.out), "rows": one.rows} for one in findings]}
    print_result(() if quiet else lines, document, as_json=json)


@app.command(name="task", show=False)
def task(
    name: str,
    settings: Path,
    /,
    *,
    quiet: Quiet = False,  # noqa: ARG001 (every verb takes it)
) -> None:
    """Do a step of an experiment that is not a verb; the commands of `lab run` use it."""
    if name not in _TASKS:
        raise MoesaicError(f"lab task {name}: not one of {', '.join(_TASKS)}")
    from moesaic_lab import data, tasks
    from moesaic_lab.plan import ROWS
    from moesaic_lab.results import write_rows

    keywords = parse_yaml(settings.read_text(encoding="utf-8"), str(settings))
    labels = keywords.pop("labels")
    rows = getattr(data if name == "prepare" else tasks, name)(**keywords)
    if rows is not None:
        write_rows(Path(ROWS) / f"{settings.stem}.jsonl", ({**labels, **row} for row in rows))
