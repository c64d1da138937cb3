"""`moesaic select`: one selection, one for each value of a field, and what is made of two selections."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.build import Call
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.common.files import check_file
from moesaic.common.place import check_place

if TYPE_CHECKING:
    from moesaic.routing.subset import Selection
    from moesaic.selection.recipe import SelectRecipe


def of_selections(paths: list[str], given: Mapping[str, Any]) -> int | None:
    """Do `--union` and `--compare`, which take files of this verb; None for a call that makes a selection."""
    union, compare, by = (given.get(key) for key in ("union", "compare", "by"))
    if union and compare:
        raise MoesaicError("--union, --compare: give one of the two")
    if compare:
        _compare(_paths(paths, "--compare A.json B.json"), given)
        return 0
    if union:
        _union(_paths(paths, "--union A.json B.json OUT.json"), given)
        return 0
    if "config" not in given:
        _paths(paths, "CHECKPOINT OUT")
        if (
            by is not None
            and {"keep", "keep_total"} & given.keys()
            and ("data" not in given or "stats" in given or "stats_out" in given)
        ):
            raise MoesaicError(f"--by {by}: takes one --data, and no --task, --stats or --stats-out")
    return None


def select_and_print(call: Call) -> int:
    """Make the selection or, with `--by`, one for each value of the field."""
    from moesaic.selection.select import select

    assert call.out is not None
    recipes = {call.out: call.recipe} if "by" not in call.further else _each(call.recipe, call.out, call.further["by"])
    made = {out: select.run(recipe, out, quiet=call.quiet) for out, recipe in recipes.items()}
    _print(made, json=call.json, quiet=call.quiet)
    return 0


def _each(recipe: "SelectRecipe", out: str, by: str) -> dict[str, "SelectRecipe"]:
    """File -> recipe, for each value of a field. All that can be refused is, before the first is run."""
    from moesaic.data.calibration import calibration_texts, categories
    from moesaic.routing.subset import FORMAT
    from moesaic.selection.texts import calibration_of

    if len(recipe.data) != 1 or recipe.task or recipe.stats or recipe.stats_out is not None:
        raise MoesaicError(f"--by {by}: takes one --data, and no --task, --stats or --stats-out")
    check_place(out)
    drawn = calibration_of(recipe.data[0], recipe)
    targets = {value: str(Path(out) / f"{_file_name(value)}.json") for value in categories(recipe.data[0], by)}
    if len(set(targets.values())) < len(targets):
        raise MoesaicError(f"--by {by}: two of its values give the same file name; use another field")
    for value, target in targets.items():
        check_file(target, replaces=FORMAT)
        calibration_texts(replace(drawn, only=(by, value)))
    return {
        target: replace(recipe, only=(by, value), domain=value if recipe.domain is None else recipe.domain)
        for value, target in targets.items()
    }


def _file_name(value: str) -> str:
    kept = "".join(character if character.isalnum() or character in "-_." else "_" for character in value)
    return kept.lstrip(".") or "_"


def _paths(paths: list[str], expected: str) -> list[str]:
    wanted = [name for name in expected.split() if not name.startswith("--")]
    if len(paths) != len(wanted):
        raise MoesaicError(f"select: expected {expected}, got {len(paths)} paths")
    return paths


def _compare(files: list[str], given: Mapping[str, Any]) -> None:
    from moesaic.routing.subset import load_selection
    from moesaic.selection.select import compare_selections

    rows = compare_selections(*map(load_selection, files))
    mean = sum(row["overlap"] for row in rows) / len(rows)
    lines = [
        f"layer {row['layer']}: {row['common']} in common of {row['kept'][0]} and {row['kept'][1]}, "
        f"overlap {row['overlap']:.3f}"
        for row in rows
    ]
    print_result([*lines, f"mean overlap {mean:.3f}"], {"layers": rows, "mean_overlap": mean}, as_json="json" in given)


def _union(files: list[str], given: Mapping[str, Any]) -> None:
    from moesaic.routing.subset import FORMAT, load_selection, save_selection
    from moesaic.selection.select import union_selections

    *parts, out = files
    check_file(out, replaces=FORMAT)
    made = union_selections(*map(load_selection, parts))
    save_selection(made, out)
    _print({out: made}, json="json" in given, quiet="quiet" in given)


def _print(made: "dict[str, Selection]", *, json: bool, quiet: bool) -> None:
    documents: list[dict[str, Any]] = [
        {
            "out": file,
            "method": selection.method,
            "experts": selection.counts[0],
            "of": selection.source.num_experts,
            "routing_mass_kept": selection.routing_mass_kept,
            "tokens": selection.details.get("domains", {}),
            "unreached": sum(map(len, selection.details.get("unreached", []))),
        }
        for file, selection in made.items()
    ]
    lines = []
    for file, selection in made.items():
        first, *more = selection.lines()
        lines += [f"{file}: {first}", *more]
    print_result(() if quiet else lines, {"selections": documents}, as_json=json)
