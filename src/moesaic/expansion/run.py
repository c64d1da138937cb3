"""The verb `expand`, and what it says that it made."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.checkpoint.push import pushed
from moesaic.checkpoint.write import check_output, write
from moesaic.common.progress import amount, notice
from moesaic.common.shown import Shown
from moesaic.common.statement import Statement
from moesaic.common.verbs import verb
from moesaic.expansion.build import build, parameters
from moesaic.expansion.exact import statement
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.resolve import ExpandPlan, resolve
from moesaic.expansion.utility import find_utilities, needs_model


@dataclass(frozen=True, kw_only=True, repr=False)
class ExpandResult(Shown):
    """The outcome of `expand`."""

    out: Path | None
    """The folder that was written; None for a dry run."""
    plan: ExpandPlan
    copies: Mapping[int, Sequence[int]] | None
    """MoE layer -> added copies of each expert; None for a dry run whose utilities need the model to run."""
    statement: Statement
    notices: tuple[str, ...]
    nbytes: int
    """Of the weight files."""
    parameters: int
    active_parameters: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Everything worth knowing as plain values, for `--json`."""
        recipe = self.plan.recipe
        return {
            "out": None if self.out is None else str(self.out),
            "experts": self.plan.experts,
            "experts_before": self.plan.model.num_experts,
            "top_k": self.plan.top_k,
            "utility": recipe.utility or recipe.utility_from,
            "routing": recipe.routing,
            "copies": None if self.copies is None else {str(layer): list(n) for layer, n in self.copies.items()},
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "bytes": self.nbytes,
            "statement": {"code": self.statement.code, "text": self.statement.text},
            "notices": list(self.notices),
            "seconds": round(self.seconds, 3),
        }

    def lines(self) -> list[str]:
        """The same for people."""
        plan = self.plan
        done = "would write" if self.out is None else f"{self.out}: wrote"
        took = "" if self.out is None else f" in {self.seconds:.1f} s"
        return [
            f"{done} {amount(self.nbytes)}{took}",
            f"{plan.experts} experts instead of {plan.model.num_experts} in {len(plan.model.layers)} layers, "
            f"{plan.top_k} active, copies by {plan.recipe.utility or plan.recipe.utility_from}, "
            f"routing {plan.recipe.routing}",
            *copies_lines(self.copies),
            f"{self.parameters:,} parameters, {self.active_parameters:,} active per token",
            f"{self.statement.code}: {self.statement.text}",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """A row per expert of the source, with its added copies; none where they are not known."""
        return [
            {"layer": layer, "expert": expert, "copies": added}
            for layer, counts in (self.copies or {}).items()
            for expert, added in enumerate(counts)
        ]


@verb(ExpandRecipe, positional=("checkpoint",), out="folder")
@pushed
def expand(
    recipe: ExpandRecipe,
    out: str | Path,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    quiet: bool = True,
    workers: int | None = None,
) -> ExpandResult:
    """Grow the routed experts of an MoE checkpoint by copies of those it has; same family, names and layout.

    Everything that can be refused from headers is refused first. Then utilities are computed where they are asked for,
    and the result is streamed to a hidden folder beside `out`, which is renamed when it is complete and synced. With
    utilities, OUT/utility.json has them, for `utility_from`.

    Raises:
        MoesaicError: a mistake in the recipe or the checkpoint, a layer whose utilities are all 0, a full disk.
    """
    started = time.monotonic()
    recipe.check_utility()
    plan = resolve(recipe)
    even = build(plan, plan.copies({}), {})  # sizes do not depend on which experts are copied
    check_output(out, even.files, [plan.checkpoint], overwrite=overwrite)  # before the model runs
    for line in plan.notices:
        notice(line, quiet=quiet)
    unknown = dry_run and needs_model(plan)
    table = None if unknown else find_utilities(plan, quiet=quiet)
    found = table.notices if table else ()
    for line in found:
        notice(line, quiet=quiet)
    copies = None if unknown else plan.copies(table.per_layer if table else {})
    if not dry_run:
        assert copies is not None
        texts = {"utility.json": table.text()} if table else {}
        write(build(plan, copies, texts), out, overwrite=overwrite, workers=workers, quiet=quiet)
    total, active = parameters(even.tensors, even.config)
    return ExpandResult(
        out=None if dry_run else Path(out),
        plan=plan,
        copies=copies,
        statement=statement(plan),
        notices=(*plan.notices, *found),
        nbytes=even.files.nbytes,
        parameters=total,
        active_parameters=active,
        seconds=time.monotonic() - started,
    )


def copies_lines(copies: Mapping[int, Sequence[int]] | None) -> list[str]:
    """The added copies of each expert, layers with the same ones in one line."""
    if copies is None:
        return ["copies per expert: not known before the gradients are"]
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer, numbers in copies.items():
        layers.setdefault(tuple(numbers), []).append(layer)
    return [f"copies added in layer {_ranges(of)}: {' '.join(map(str, numbers))}" for numbers, of in layers.items()]


def _ranges(layers: Sequence[int]) -> str:
    """3, 4, 5, 9 as 3-5,9."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)
