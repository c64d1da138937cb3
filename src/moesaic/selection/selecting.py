"""The verb `select`: score the experts of a model on calibration data and choose the ones to keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.checkpoint.pio import check_file
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.families.counting import trained_context
from moesaic.families.moe import MoEModel, detect_running
from moesaic.selection.calibration import Calibration, calibration_texts, domain_of, encode_texts
from moesaic.selection.choose import best_experts, check_counts, parse_keep
from moesaic.selection.request import METHODS, EasyEpVariant, Method, SelectRequest
from moesaic.selection.scorers import routing_mass, score, score_random
from moesaic.selection.selection import FORMAT, Selection, save_selection
from moesaic.selection.source import SourceModel, describe, refuse_other_model
from moesaic.selection.statistics import FORMAT as STATISTICS_FORMAT
from moesaic.selection.statistics import (
    ExpertStatistics,
    load_statistics,
    merge_by_domain,
    save_statistics,
)


def select(
    checkpoint: str | Path,
    out: str | Path | None = None,
    *,
    keep: str | int,
    data: str | Path | None = None,
    stats: Sequence[str | Path] = (),
    stats_out: str | Path | None = None,
    method: Method = "router",
    easy_ep_variant: EasyEpVariant = "original",
    layerwise: bool = False,
    examples: int | None = None,
    shots: int = 0,
    template: str | None = None,
    split: float | None = None,
    only: tuple[str, str] | None = None,
    domain: str | None = None,
    top_k: int | None = None,
    max_tokens: int = 2048,
    batch_size: int = 8,
    seed: int = 0,
    quiet: bool = True,
) -> Selection:
    """Choose the experts to keep in each MoE layer, and write them to `out` if given.

    The model is streamed from disk, one layer in memory at a time, so it may be larger than memory. One pass gives the
    statistics of all methods.

    Args:
        checkpoint: the model: folder, or hub id `org/name[@revision]`, with its tokenizer.
        out: JSON file to write.
        keep: experts per layer: 32, or "25%".
        data: calibration file or folder (see `moesaic.selection.calibration`).
        stats: statistics files to use as well, or instead of data: added within a domain, mixed over domains.
        stats_out: file for the statistics of this pass.
        method: router, easy_ep, reap, frequency or random.
        easy_ep_variant: original (arXiv 2504.06792) or emo.
        layerwise: score each layer with the layers before it already cut.
        examples: number of records of the data, a nested sample by the seed; default: all.
        shots: other records put before each example.
        template: text of a record, with {field} for its fields.
        split: draw from this share of the records only.
        only: (field, value) of the records to use.
        domain: name of the data; default: the file's name up to its first dot.
        top_k: active experts of the result; needed where fewer than the model's are kept.
        max_tokens: first tokens of each text that are used; never more than the model was trained for.
        batch_size: texts at once; changes nothing beyond rounding.
        seed: of the sample, and of `random`.
        quiet: print no progress and no notices.

    Raises:
        MoesaicError: what cannot be kept, an empty calibration set, statistics of another model, no tokenizer, a file
            that cannot be written (before anything is scored).
    """
    request = SelectRequest(
        keep=keep,
        method=method,
        easy_ep_variant=easy_ep_variant,
        layerwise=layerwise,
        top_k=top_k,
        domain=domain,
        max_tokens=max_tokens,
        batch_size=batch_size,
    )
    calibration = None
    if data is not None:
        calibration = Calibration(
            path=str(data), template=template, examples=examples, shots=shots, split=split, only=only, seed=seed
        )
    _check(request, calibration, stats, stats_out)
    if out is not None and stats_out is not None and Path(out).resolve() == Path(stats_out).resolve():
        raise MoesaicError(f"--stats-out {stats_out}: is the selection's own file; name another")
    if stats_out is not None and Path(stats_out).resolve() in {Path(file).resolve() for file in stats}:
        raise MoesaicError(f"--stats-out {stats_out}: is one of --stats; name another file")
    for target, kind in ((out, FORMAT), (stats_out, STATISTICS_FORMAT)):
        if target is not None:
            check_file(target, replaces=kind)
    opened = open_checkpoint(checkpoint)
    model = detect_running(opened)
    source = describe(opened, model)
    count = parse_keep(keep, source.num_experts, source.num_groups)
    if count % source.num_groups:
        raise MoesaicError(f"--keep {keep}: must be a multiple of {source.num_groups}, the router's expert groups")
    probe = [best_experts(np.zeros(source.num_experts), count, source.num_groups)] * len(source.layers)
    check_counts(source, _without_own_groups(opened), probe, top_k=top_k, where=f"--keep {keep}")
    parts = [_load(file, source) for file in stats]
    if calibration is not None:
        pass_ = _measure(request, calibration, opened, model, source, count, quiet)
        if stats_out is not None:
            save_statistics(pass_, stats_out)
        parts.append(pass_)
    merged = merge_by_domain(parts) if parts else []
    selection = choose(request, source, merged, count, seed=seed, details=_details(request, calibration, merged))
    check_counts(source, opened.config, selection.kept, top_k=top_k, where=f"--keep {keep}")
    _tell_unreached(merged, source, quiet)
    if out is not None:
        save_selection(selection, out)
    return selection


def choose(
    request: SelectRequest,
    source: SourceModel,
    statistics: Sequence[ExpertStatistics],
    keep: int,
    *,
    seed: int,
    details: dict[str, Any],
) -> Selection:
    """The selection from statistics (one per domain); `random` needs none."""
    scores_LE = _scores(request, source, statistics, seed)
    kept = tuple(best_experts(row_E, keep, source.num_groups) for row_E in scores_LE)
    return Selection(
        source=source,
        method=request.method,
        layers=source.layers,
        kept=kept,
        scores=tuple(map(tuple, scores_LE.tolist())),
        routing_mass_kept=routing_mass(statistics, kept) if statistics else None,
        details={"keep": str(request.keep), "seed": seed, **details},
    )


def _scores(
    request: SelectRequest, source: SourceModel, statistics: Sequence[ExpertStatistics], seed: int
) -> np.ndarray:
    if request.method == "random":
        return score_random(source.layers, source.num_experts, seed)
    return score(statistics, request.method, request.easy_ep_variant)


def _check(
    request: SelectRequest,
    calibration: Calibration | None,
    stats: Sequence[str | Path],
    stats_out: str | Path | None,
) -> None:
    if request.method not in METHODS:
        raise MoesaicError(f"--method {request.method}: not one of {', '.join(METHODS)}")
    if calibration is None and not stats and request.method != "random":
        raise MoesaicError(f"--method {request.method}: needs calibration text; give --data FILE, or --stats FILE")
    if stats_out is not None and calibration is None:
        raise MoesaicError(f"--stats-out {stats_out}: there is no pass to write statistics of; give --data FILE")
    if request.layerwise and (stats or stats_out is not None or calibration is None):
        raise MoesaicError(
            "--layerwise: scores belong to this choice of experts, so it takes --data and no --stats or --stats-out"
        )
    for flag, value in (("--max-tokens", request.max_tokens), ("--batch-size", request.batch_size)):
        if value < 1:
            raise MoesaicError(f"{flag} {value}: must be at least 1")


def _without_own_groups(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config for checks before any expert is chosen: how many of our own groups are left is not known yet."""
    return {key: value for key, value in checkpoint.config.items() if key != "expert_groups"}


def _load(file: str | Path, source: SourceModel) -> ExpertStatistics:
    statistics = load_statistics(file)
    refuse_other_model(statistics.source, source, str(file))
    return statistics


def _measure(
    request: SelectRequest,
    calibration: Calibration,
    checkpoint: Checkpoint,
    model: MoEModel,
    source: SourceModel,
    keep: int,
    quiet: bool,
) -> ExpertStatistics:
    texts = calibration_texts(calibration, quiet=quiet)
    sequences = _encode(texts, request.max_tokens, calibration.path, checkpoint, quiet)
    from moesaic.selection.capture import capture

    def kept(layer: ExpertStatistics) -> tuple[int, ...]:
        return best_experts(_scores(request, layer.source, [layer], calibration.seed)[0], keep, source.num_groups)

    return capture(
        checkpoint,
        model,
        source,
        sequences,
        domain=request.domain or domain_of(calibration.path),
        batch_size=request.batch_size,
        layerwise=kept if request.layerwise else None,
        top_k=request.top_k,
        quiet=quiet,
    )


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
    request: SelectRequest, calibration: Calibration | None, statistics: Sequence[ExpertStatistics]
) -> dict[str, Any]:
    details: dict[str, Any] = {"layerwise": request.layerwise, "top_k": request.top_k}
    if request.method == "easy_ep":
        details["easy_ep_variant"] = request.easy_ep_variant
    if calibration is not None:
        data = {key: value for key, value in vars(calibration).items() if value is not None}
        details["data"] = data | ({"only": list(calibration.only)} if calibration.only else {})
    details["domains"] = {one.domain: one.tokens for one in statistics}
    details["unreached"] = _unreached(statistics)
    return details


def _unreached(statistics: Sequence[ExpertStatistics]) -> list[list[int]]:
    """Per layer, the experts that no token selected."""
    if not statistics:
        return []
    counts_LE = np.sum([one.counts_LE for one in statistics], axis=0)
    return [np.flatnonzero(row_E == 0).tolist() for row_E in counts_LE]


def _tell_unreached(statistics: Sequence[ExpertStatistics], source: SourceModel, quiet: bool) -> None:
    number = sum(map(len, _unreached(statistics)))
    if number:
        total = source.num_experts * len(source.layers)
        notice(
            f"{number} of {total} experts were selected by no calibration token (listed in the selection)", quiet=quiet
        )
