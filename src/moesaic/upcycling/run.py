"""The verb `upcycle`."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import TensorInfo
from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.write import NewCheckpoint, check_output, check_sources, write
from moesaic.checkpoint.writer import parse_size
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.common.verbs import verb
from moesaic.common.workers import default_workers
from moesaic.modeling.names import code_files
from moesaic.routing.gradient import gradient_warning
from moesaic.upcycling.layers import new_tensors, used_tensors
from moesaic.upcycling.plan import BASE, UpcyclePlan, resolve
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.result import UNREAD, UpcycleResult, model_card, statement

_WAYS_OUT = "use --dtype bfloat16 or float32, another --scale, or --allow-nonfinite"

Hashes = list[dict[str, str]]
"""Per source (base first): tensor name -> hash of its bytes."""


def _named(specialists: Any) -> list[dict[str, str]]:
    """Python callers give short names and folders, in the order of their experts."""
    if specialists is None:
        return []
    if not isinstance(specialists, Mapping):
        raise MoesaicError(f"expected short names and folders, such as {{'math': './math'}}, got {specialists!r}")
    return [{"name": name, "path": str(path)} for name, path in specialists.items()]


@verb(UpcycleRecipe, positional=("base",), out="folder", convert={"specialists": _named})
@pushed
def upcycle(
    recipe: UpcycleRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> UpcycleResult:
    """Turn a dense checkpoint, or a base and its specialists, into a mixture-of-experts checkpoint.

    Everything that can be refused from headers is refused first; then all sources are read once (NaN, hashes); then the
    result is streamed to a hidden folder beside `out`, which is renamed when it is complete and synced.

    Raises:
        MoesaicError: a mistake in the recipe or the sources, a full disk, a target that exists.
    """
    started = time.monotonic()
    plan = resolve(recipe)
    notices = list(plan.notices)
    for line in notices:
        notice(line, quiet=quiet)
    check_output(out, plan.files, [model.checkpoint for model in plan.models], overwrite=overwrite)
    if dry_run:
        promise = statement(plan.layer, identical=len(plan.ffn_sources) == 1)
        unread = (UNREAD,) if plan.specialists else ()
        said = (*plan.notices, *unread, *_untaught(plan, quiet))
        return UpcycleResult(out=None, plan=plan, statement=promise, notices=said, seconds=0.0)
    count = workers or default_workers()
    tensors = new_tensors(plan)
    hashes = _check_sources(plan, used_tensors(plan, tensors), count, quiet)
    for line in _equal_specialists(plan, hashes):
        notices.append(line)
        notice(line, quiet=quiet)
    promise = statement(plan.layer, identical=_equal_ffns(plan, hashes, plan.ffn_sources))
    roles = ["base", *(specialist.name for specialist in plan.recipe.specialists)]
    new = NewCheckpoint(
        verb="upcycle",
        sources=tuple(zip(roles, (model.checkpoint for model in plan.models), strict=True)),
        tensors=tensors,
        config=plan.config,
        recipe=plan.recipe,
        seed=plan.recipe.seed,
        card=model_card(plan, promise, UpcycleResult.count(plan)),
        record={"statement": {"code": promise.code, "text": promise.text}},
        texts=code_files(plan.config),
        shard_size=parse_size(plan.recipe.shard_size),
        allow_nonfinite=plan.recipe.allow_nonfinite,
        if_out_of_range=_WAYS_OUT,
    )
    write(new, out, overwrite=overwrite, workers=count, quiet=quiet, hashes=hashes)
    return UpcycleResult(
        out=Path(out),
        plan=plan,
        statement=promise,
        notices=(*notices, *_untaught(plan, quiet)),
        seconds=time.monotonic() - started,
    )


def _untaught(plan: UpcyclePlan, quiet: bool) -> tuple[str, ...]:
    """Say where training could not teach the routers what they have to choose."""
    line = gradient_warning(plan.layer.router_choices)
    if line is None:
        return ()
    notice(line, quiet=quiet)
    return (line,)


def _check_sources(plan: UpcyclePlan, used: Sequence[Iterable[TensorInfo]], workers: int, quiet: bool) -> Hashes:
    """Read everything that goes into the result once: refuse NaN and infinity, and hash.

    Where all experts come from equal FFNs of several sources, the rest is read as well: with the hashes of whole
    checkpoints in the record, `verify` can tell whether the sources are the same model.
    """
    hashes = check_sources(used, workers, quiet=quiet, allow_nonfinite=plan.recipe.allow_nonfinite)
    if not plan.specialists or not _equal_ffns(plan, hashes, plan.expert_sources):
        return hashes
    pairs = zip(plan.models, hashes, strict=True)
    rest = [[info for name, info in model.checkpoint.tensors.items() if name not in found] for model, found in pairs]
    more = check_sources(rest, workers, quiet=quiet, allow_nonfinite=True)
    return [first | second for first, second in zip(hashes, more, strict=True)]


def _equal_ffns(plan: UpcyclePlan, hashes: Hashes, sources: Sequence[int]) -> bool:
    """Whether these sources have the same FFN weights in all MoE layers."""
    return len({_ffn_hashes(plan, hashes, source) for source in sources}) == 1


def _ffn_hashes(plan: UpcyclePlan, hashes: Hashes, source: int) -> tuple[str, ...]:
    """Hashes of the tensors that hold one source's FFNs of the MoE layers."""
    return tuple(
        hashes[source][part.sources[0].name]
        for layer in plan.moe_layers
        for part in plan.models[source].ffns[layer].parts().values()
    )


def _equal_specialists(plan: UpcyclePlan, hashes: Hashes) -> list[str]:
    """One sentence for each set of specialists whose FFNs are the same weights."""
    names: dict[tuple[str, ...], list[str]] = {}
    for source, specialist in enumerate(plan.recipe.specialists, start=BASE + 1):
        names.setdefault(_ffn_hashes(plan, hashes, source), []).append(specialist.name)
    everyone = len(plan.recipe.specialists)
    equal = [same for same in names.values() if len(same) > 1]
    whose = ["all specialists" if len(same) == everyone else f"the specialists {', '.join(same)}" for same in equal]
    return [f"{who} have the same FFN weights: the experts are identical until they are trained" for who in whose]
