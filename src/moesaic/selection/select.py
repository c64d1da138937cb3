"""The verb `select`: score the experts of a model on calibration data and choose the ones to keep; unions, overlaps."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from numpy import ndarray

from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import check_file
from moesaic.common.progress import notice
from moesaic.common.verbs import verb
from moesaic.data.calibration import encode_texts
from moesaic.families.counting import trained_context
from moesaic.families.identity import SourceModel, describe, refuse_other_model, shared_count
from moesaic.families.moe import MoEModel, detect_running, prediction_notices
from moesaic.routing.subset import FORMAT, Selection, check_counts, save_selection
from moesaic.selection.recipe import SelectRecipe
from moesaic.selection.scorers import mix_domains, routing_mass, score, score_random
from moesaic.selection.statistics import FORMAT as STATISTICS_FORMAT
from moesaic.selection.statistics import ExpertStatistics, load_statistics, merge_by_domain, save_statistics
from moesaic.selection.texts import (
    CalibrationSet,
    calibration_sets,
    data_details,
    little_said,
    refuse_wrong_settings,
)


def _several(given: Any) -> tuple[str, ...]:
    return () if given is None else (str(given),) if isinstance(given, str | Path) else tuple(map(str, given))


@verb(SelectRecipe, positional=("checkpoint",), out="file", convert={"data": _several, "task": _several})
def select(recipe: SelectRecipe, out: str | Path | None = None, *, quiet: bool = True) -> Selection:
    """Choose the experts to keep in each MoE layer, and write them to the JSON file `out` if given.

    The model is streamed from disk, one layer in memory at a time, so it may be larger than memory. One pass gives the
    statistics of all methods.

    Raises:
        MoesaicError: what cannot be kept, an empty calibration set, statistics of another model, no tokenizer, a file
            that cannot be written (before anything is scored).
    """
    refuse_wrong_settings(recipe)
    _check_targets(recipe, out)
    opened = open_checkpoint(recipe.checkpoint)
    model = detect_running(opened)
    source = describe(opened, model)
    for line in prediction_notices(opened, "its experts are not scored, and `extract` leaves it out"):
        notice(line, quiet=quiet)
    count = _count(recipe, source, model, opened.config)
    parts = [_load(file, source) for file in recipe.stats]
    sets = calibration_sets(recipe, quiet=quiet)
    if sets:
        measured = _measure(recipe, sets, opened, model, source, count, quiet)
        if recipe.stats_out is not None:
            save_statistics(measured[0], recipe.stats_out)
        parts += measured
    merged = merge_by_domain(parts) if parts else []
    selection = _choose(recipe, source, merged, count, _details(recipe, sets, merged))
    for line in little_said(selection.details["domains"]):
        notice(line, quiet=quiet)
    check_counts(source, opened.config, selection.kept, top_k=recipe.top_k, where=recipe.asked)
    if unreached := sum(map(len, selection.details["unreached"])):
        total = source.num_experts * len(source.layers)
        notice(
            f"{unreached} of {total} experts were selected by no calibration token (listed in the selection)",
            quiet=quiet,
        )
    if out is not None:
        save_selection(selection, out)
    return selection


def _check_targets(recipe: SelectRecipe, out: str | Path | None) -> None:
    """Refuse files that cannot be written, or would be written over what is still needed."""
    stats_out = recipe.stats_out
    if out is not None and stats_out is not None and Path(out).resolve() == Path(stats_out).resolve():
        raise MoesaicError(f"--stats-out {stats_out}: is the selection's own file; name another")
    if stats_out is not None and Path(stats_out).resolve() in {Path(file).resolve() for file in recipe.stats}:
        raise MoesaicError(f"--stats-out {stats_out}: is one of --stats; name another file")
    for target, kind in ((out, FORMAT), (stats_out, STATISTICS_FORMAT)):
        if target is not None:
            check_file(target, replaces=kind)


def _count(recipe: SelectRecipe, source: SourceModel, model: MoEModel, config: Mapping[str, Any]) -> int:
    """The number of routed experts to keep in each layer; refuses what no choice of experts could make run."""
    groups = source.num_groups
    if recipe.keep_total is None:
        count = parse_keep(str(recipe.keep), source.num_experts, groups)
    else:
        shared = shared_count(config, model)
        count = parse_keep(recipe.keep_total, source.num_experts + shared, flag="--keep-total") - shared
        if count < 1:
            raise MoesaicError(f"{recipe.asked}: {shared} of these are shared experts; give at least {shared + 1}")
    if count % groups:
        raise MoesaicError(f"{recipe.asked}: must be a multiple of {groups}, the router's expert groups")
    probe = [best_experts(np.zeros(source.num_experts), count, groups)] * len(source.layers)
    known = {
        key: value for key, value in config.items() if key != "expert_groups"
    }  # how many are left is not known yet
    check_counts(source, known, probe, top_k=recipe.top_k, where=recipe.asked)
    return count


def _choose(
    recipe: SelectRecipe,
    source: SourceModel,
    statistics: Sequence[ExpertStatistics],
    keep: int,
    details: dict[str, Any],
) -> Selection:
    """The selection from statistics (one per domain); `random` needs none."""
    scores_LE = _scores(recipe, source, statistics)
    kept = tuple(best_experts(row_E, keep, source.num_groups) for row_E in scores_LE)
    return Selection(
        source=source,
        method=recipe.method,
        layers=source.layers,
        kept=kept,
        scores=tuple(map(tuple, scores_LE.tolist())),
        routing_mass_kept=routing_mass(statistics, kept) if statistics else None,
        details={"keep": str(recipe.keep or keep), "seed": recipe.seed, **details},
    )


def _scores(recipe: SelectRecipe, source: SourceModel, statistics: Sequence[ExpertStatistics]) -> np.ndarray:
    if recipe.method == "random":
        return score_random(source.layers, source.num_experts, recipe.seed)
    return score(statistics, recipe.method, recipe.easy_ep_variant)


def _load(file: str | Path, source: SourceModel) -> ExpertStatistics:
    statistics = load_statistics(file)
    refuse_other_model(statistics.source, source, str(file))
    return statistics


def _measure(
    recipe: SelectRecipe,
    sets: Sequence[CalibrationSet],
    checkpoint: Checkpoint,
    model: MoEModel,
    source: SourceModel,
    keep: int,
    quiet: bool,
) -> list[ExpertStatistics]:
    """The statistics of every set, from one pass; sets of one domain are one."""
    texts: dict[tuple[str, str | None], list[str]] = {}
    for one in sets:
        texts.setdefault((one.domain, one.path), []).extend(one.texts)
    keys = {f"{number} {domain}": (domain, path) for number, (domain, path) in enumerate(texts)}
    sequences = {
        key: _encode(texts[place], recipe.max_tokens, place[1] or place[0], checkpoint, quiet)
        for key, place in keys.items()
    }
    from moesaic.selection.collect import collect_statistics

    def kept(layer: Sequence[ExpertStatistics]) -> tuple[int, ...]:
        return best_experts(_scores(recipe, layer[0].source, layer)[0], keep, source.num_groups)

    measured = collect_statistics(
        checkpoint,
        model,
        source,
        sequences,
        batch_size=recipe.batch_size,
        layerwise=kept if recipe.layerwise else None,
        top_k=recipe.top_k,
        quiet=quiet,
    )
    return [replace(one, domain=keys[one.domain][0], path=keys[one.domain][1]) for one in measured]


def _encode(texts: Sequence[str], max_tokens: int, name: str, checkpoint: Checkpoint, quiet: bool) -> list[list[int]]:
    """Token ids of each text, cut to what is asked for and to what the model was trained for."""
    # After everything that can be refused without torch.
    from moesaic.loading import load_config, load_tokenizer

    tokenizer = load_tokenizer(checkpoint.path)
    limit = min(max_tokens, trained_context(load_config(checkpoint.path, checkpoint.name)) or max_tokens)
    sequences = encode_texts(
        texts, tokenizer, max_tokens=limit, vocab_size=int(checkpoint.config["vocab_size"]), name=name
    )
    if cut := sum(len(ids) == limit for ids in sequences):
        why = "" if limit == max_tokens else ", the most that the model was trained for (max_position_embeddings)"
        notice(f"{cut} of {len(sequences)} texts have at least {limit} tokens{why}: only these count", quiet=quiet)
    return sequences


def _details(
    recipe: SelectRecipe, sets: Sequence[CalibrationSet], statistics: Sequence[ExpertStatistics]
) -> dict[str, Any]:
    details: dict[str, Any] = {"layerwise": recipe.layerwise, "top_k": recipe.top_k}
    if recipe.method == "easy_ep":
        details["easy_ep_variant"] = recipe.easy_ep_variant
    if sets:
        details["data"] = data_details(recipe, sets)
    details["domains"] = {one.domain: one.tokens for one in statistics}
    counts_LE = np.sum([one.counts_LE for one in statistics], axis=0) if statistics else ()
    details["unreached"] = [np.flatnonzero(row_E == 0).tolist() for row_E in counts_LE]  # selected by no token
    return details


# --- from scores to kept experts ------------------------------------------------------------------------------------


def parse_keep(text: str | int, num_experts: int, num_groups: int = 1, flag: str = "--keep") -> int:
    """Number of experts in "32" or "25%" (rounded up, to whole experts per group); refuses what is not in 1..E."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", str(text))
    if match:
        share = float(match[1]) / 100
        # Rounded first, because 0.07 * 100 is a little more than 7 in floating point.
        keep = math.ceil(round(share * num_experts / num_groups, 9)) * num_groups
    elif re.fullmatch(r"\s*\d+\s*", str(text)):
        keep = int(text)
    else:
        raise MoesaicError(f"{flag} {text}: not a number of experts; write 32, or 25%")
    if not 1 <= keep <= num_experts:
        raise MoesaicError(f"{flag} {text}: must be from 1 to {num_experts}, the number of experts in each layer")
    return keep


def best_experts(scores_E: Float64[ndarray, " experts"], keep: int, num_groups: int = 1) -> tuple[int, ...]:
    """Ids of the `keep` best experts in rising order, equally many of each group; of equal scores the lower id wins."""
    assert keep % num_groups == 0, "check_counts comes first"
    size = len(scores_E) // num_groups
    ids = [
        group * size + int(place)
        for group in range(num_groups)
        for place in np.argsort(-scores_E[group * size : (group + 1) * size], kind="stable")[: keep // num_groups]
    ]
    return tuple(sorted(ids))


def union_selections(first: Selection, second: Selection) -> Selection:
    """The experts that either keeps, filled up so that every layer (and group) keeps the same number.

    Layers with fewer take their best experts by the sum of both scores, each layer's row normalised to sum 1.
    """
    refuse_other_model(first.source, second.source, "the second selection")
    source = first.source
    scores_LE = mix_domains([np.array(one.scores, dtype=np.float64).clip(min=0) for one in (first, second)])
    union = [set(ours) | set(theirs) for ours, theirs in zip(first.kept, second.kept, strict=True)]
    size = source.num_experts // source.num_groups
    most = max(sum(expert // size == group for expert in ids) for ids in union for group in range(source.num_groups))
    active = [one.top_k for one in (first, second) if one.top_k is not None]
    kept = []
    for ids, scores_E in zip(union, scores_LE, strict=True):
        first_E = scores_E + np.isin(np.arange(source.num_experts), sorted(ids)) * (scores_E.max() + 1)
        kept.append(best_experts(first_E, most * source.num_groups, source.num_groups))
    return Selection(
        source=source,
        method="union",
        layers=source.layers,
        kept=tuple(kept),
        scores=tuple(tuple(row) for row in scores_LE.tolist()),
        routing_mass_kept=None,
        details={
            "top_k": max(active) if len(active) == 2 else None,  # None is the model's own, which is the largest
            "methods": [first.method, second.method],
            "filled_up": [len(row) - len(ids) for row, ids in zip(kept, union, strict=True)],
        },
    )


def compare_selections(first: Selection, second: Selection) -> list[dict[str, Any]]:
    """Per layer: how many experts each keeps, how many both keep, and that number over the size of the union.

    The two may keep different numbers, and be of different models as long as layers and number of experts agree.
    """
    for key in ("layers", "num_experts"):
        ours, theirs = getattr(first.source, key), getattr(second.source, key)
        if ours != theirs:
            raise MoesaicError(
                f"the selections are of models with different {key}: {ours} ({first.source.name}) and "
                f"{theirs} ({second.source.name})"
            )
    rows = []
    for layer, ours, theirs in zip(first.layers, first.kept, second.kept, strict=True):
        both, either = set(ours) & set(theirs), set(ours) | set(theirs)
        rows.append(
            {
                "layer": layer,
                "kept": [len(ours), len(theirs)],
                "common": len(both),
                "overlap": len(both) / len(either) if either else 1.0,
            }
        )
    return rows
