"""`moesaic select`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from moesaic.checkpoint.pio import check_file
from moesaic.cli.options import Json, Quiet, Seed
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.selection.recipe import EasyEpVariant, Method

if TYPE_CHECKING:
    from moesaic.data.calibration import Calibration
    from moesaic.routing.subset import Selection

NAME = "select"
USAGE = """Usage: moesaic select CHECKPOINT OUT.json --data CALIB --keep 32|25% [OPTIONS]
       moesaic select --union A.json B.json OUT.json
       moesaic select --compare A.json B.json"""
EXAMPLE = """Examples:
  moesaic select ./moe math.json --data math.jsonl --keep 25% --examples 5
  moesaic select ./moe both.json --stats math.stats.json --stats code.stats.json --keep 32
  moesaic select ./moe mmlu --data mmlu.jsonl --by mmlu_category --split 0.4 --shots 5 --keep 25%
"""


def command(
    *paths: Annotated[
        str,
        Parameter(name="CHECKPOINT OUT", help="Folder or hub id, and the JSON file to write (with --by: a folder)."),
    ],
    keep: Annotated[
        str | None, Parameter(help="Experts to keep in each layer: a number, or a share such as 25%.")
    ] = None,
    data: Annotated[
        str | None, Parameter(help="Calibration text: .txt, .md, .jsonl or .parquet, a file or a folder of files.")
    ] = None,
    method: Annotated[Method, Parameter(help="How experts are scored.")] = "router",
    easy_ep_variant: Annotated[
        EasyEpVariant, Parameter(help="easy_ep: before the block's norm and routed output only, or EMO's way.")
    ] = "original",
    layerwise: Annotated[bool, Parameter(help="Score each layer with the layers before it already cut.")] = False,
    examples: Annotated[
        int | None, Parameter(help="Records to use, drawn by the seed; fewer are a part of more [default: all].")
    ] = None,
    shots: Annotated[int, Parameter(help="Other records put before each example.")] = 0,
    template: Annotated[
        str | None,
        Parameter(help="Text of a record, such as 'Q: {question}\\nA: {answer_text}' [default: by its fields]."),
    ] = None,
    by: Annotated[
        str | None, Parameter(help="Make one selection for each value of this field, or mmlu_category.")
    ] = None,
    split: Annotated[
        float | None, Parameter(help="Use this share of the records only, such as 0.4; the rest is for evaluation.")
    ] = None,
    domain: Annotated[str | None, Parameter(help="Name of the data [default: from the file's name].")] = None,
    stats: Annotated[
        tuple[str, ...],
        Parameter(
            help="Statistics to use, repeatable: added within a domain, mixed over domains.",
            metavar="FILE",
            show_default=False,
        ),
    ] = (),
    stats_out: Annotated[str | None, Parameter(help="Write the statistics of this pass here.")] = None,
    top_k: Annotated[
        int | None, Parameter(help="Experts that each token of the subset uses [default: as the model].")
    ] = None,
    max_tokens: Annotated[int, Parameter(help="First tokens of each text that are used.")] = 2048,
    batch_size: Annotated[int, Parameter(help="Texts at once; more is faster and needs more memory.")] = 8,
    union: Annotated[bool, Parameter(help="Write the union of two selections.")] = False,
    compare: Annotated[bool, Parameter(help="Say how far two selections agree.")] = False,
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Score the experts of a mixture-of-experts model on calibration text and choose the ones to keep.

    The model is read from disk one layer at a time, so it may be larger than memory.
    """
    if union and compare:
        raise MoesaicError("--union, --compare: give one of the two")
    if compare:
        first, second = _paths(paths, "--compare A.json B.json")
        _compare(first, second, json=json)
        return
    if union:
        first, second, out = _paths(paths, "--union A.json B.json OUT.json")
        from moesaic.routing.subset import FORMAT, load_selection, save_selection
        from moesaic.selection.select import union_selections

        check_file(out, replaces=FORMAT)
        made = union_selections(load_selection(first), load_selection(second))
        save_selection(made, out)
        _print({out: made}, json=json, quiet=quiet)
        return
    checkpoint, out = _paths(paths, "CHECKPOINT OUT")
    if keep is None:
        raise MoesaicError(
            "--keep: is needed; give the number of experts to keep in each layer, or a share such as 25%"
        )
    if by is not None and (data is None or stats or stats_out is not None):
        raise MoesaicError(f"--by {by}: takes --data, and no --stats or --stats-out")
    from moesaic.data.calibration import Calibration
    from moesaic.selection.select import select

    def run(target: str, only: tuple[str, str] | None) -> "Selection":
        return select(
            checkpoint,
            target,
            keep=keep,
            data=data,
            stats=stats,
            stats_out=stats_out,
            method=method,
            easy_ep_variant=easy_ep_variant,
            layerwise=layerwise,
            examples=examples,
            shots=shots,
            template=template,
            split=split,
            only=only,
            domain=only[1] if only is not None and domain is None else domain,
            top_k=top_k,
            max_tokens=max_tokens,
            batch_size=batch_size,
            seed=seed,
            quiet=quiet,
        )

    if by is None or data is None:
        made = {out: run(out, None)}
    else:
        drawn = Calibration(path=data, template=template, examples=examples, shots=shots, split=split, seed=seed)
        made = _each(run, out, drawn, by)
    _print(made, json=json, quiet=quiet)


def _each(
    run: "Callable[[str, tuple[str, str] | None], Selection]", out: str, drawn: "Calibration", by: str
) -> "dict[str, Selection]":
    """One selection for each value of a field: file -> selection. All that can be refused is, before the first."""
    from moesaic.data.calibration import calibration_texts, categories
    from moesaic.routing.subset import FORMAT

    targets = {value: str(Path(out) / f"{_file_name(value)}.json") for value in categories(drawn.path, by)}
    if len(set(targets.values())) < len(targets):
        raise MoesaicError(f"--by {by}: two of its values give the same file name; use another field")
    for value, target in targets.items():
        check_file(target, replaces=FORMAT)
        calibration_texts(replace(drawn, only=(by, value)))
    return {target: run(target, (by, value)) for value, target in targets.items()}


def _file_name(value: str) -> str:
    kept = "".join(character if character.isalnum() or character in "-_." else "_" for character in value)
    return kept.lstrip(".") or "_"


def _paths(paths: tuple[str, ...], expected: str) -> tuple[str, ...]:
    names = expected.split()
    wanted = [name for name in names if not name.startswith("--")]
    if len(paths) != len(wanted):
        raise MoesaicError(f"select: expected {expected}, got {len(paths)} paths")
    return paths


def _compare(first: str, second: str, *, json: bool) -> None:
    from moesaic.routing.subset import load_selection
    from moesaic.selection.select import compare_selections

    rows = compare_selections(load_selection(first), load_selection(second))
    mean = sum(row["overlap"] for row in rows) / len(rows)
    lines = [
        f"layer {row['layer']}: {row['common']} in common of {row['kept'][0]} and {row['kept'][1]}, "
        f"overlap {row['overlap']:.3f}"
        for row in rows
    ]
    print_result([*lines, f"mean overlap {mean:.3f}"], {"layers": rows, "mean_overlap": mean}, as_json=json)


def _print(made: "dict[str, Selection]", *, json: bool, quiet: bool) -> None:
    documents: list[dict[str, Any]] = [
        {
            "out": file,
            "method": selection.method,
            "experts": selection.counts[0],
            "of": selection.source.num_experts,
            "routing_mass_kept": selection.routing_mass_kept,
            "unreached": sum(map(len, selection.details.get("unreached", []))),
        }
        for file, selection in made.items()
    ]
    lines = []
    for row in documents:
        mass = row["routing_mass_kept"]
        share = "" if mass is None else f", {sum(mass) / len(mass):.1%} of the routing mass"
        lines.append(f"{row['out']}: {row['experts']} of {row['of']} experts per layer by {row['method']}{share}")
    print_result(() if quiet else lines, {"selections": documents}, as_json=json)
