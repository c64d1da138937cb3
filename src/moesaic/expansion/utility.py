"""The utility score: how useful more copies of each expert would be, from weights, from gradients, or from a file.

Expert Upcycling (arXiv 2604.19835), section 3. A score is one number of each expert and layer, not negative, over
matrices w of the expert: fc1 (gate and up), fc2 (down), or both as one vector. g is the gradient of the loss on
calibration text, averaged over batches in fp32 and only then normed: `gradient_norm` ||g||_2 (the paper's best),
`gradient_squared` its square, `saliency` ||w||_2 * ||g||_2, `weight_norm` ||w||_2, and, with the second moments v of
AdamW, `approx_fisher` ||g||_2^2 / (||v||_2 + 1e-8). `uniform` needs no score. E experts.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moesaic.checkpoint.record import source_record
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.progress import progress
from moesaic.data.packing import keeps_documents_apart, one_per_row
from moesaic.expansion.build import Parts, expert_parts
from moesaic.expansion.calibration import calibration_batches
from moesaic.expansion.recipe import GRADIENT_UTILITIES, UtilityLayers
from moesaic.expansion.resolve import ExpandPlan
from moesaic.families.counting import beyond_depth

if TYPE_CHECKING:
    from moesaic.data.packing import PackedBatch

FORMAT = "moesaic-utility/1"
PerLayer = Mapping[int, tuple[float, ...]]
"""MoE layer -> one number per expert."""

# The experts of every family are stacked in memory. The name of a shared expert has another word before the dot.
_EXPERTS = re.compile(r"layers\.(?P<layer>\d+)\..*\bexperts$")

_EXPERTS_AT_ONCE = 4
"""Adding to a sum of a wider type makes a copy: a small one stays in the cache, and its memory is used again."""


@dataclass(frozen=True, kw_only=True)
class ExpertGradients:
    """What a pass over calibration text says of each expert, over the matrices that count."""

    gradient_norms: PerLayer
    """`||g||_2`, g averaged over the batches."""
    weight_norms: PerLayer
    moment_norms: PerLayer | None = None
    """`||v||_2` of AdamW's second moments as they are stored; None where there is no optimizer."""
    tokens: Mapping[int, tuple[int, ...]]
    """Calibration tokens that were sent to the expert, padding not counted."""
    batches: int


_FISHER_EPSILON = 1e-8

_SCORES: dict[str, Callable[[ExpertGradients, int], tuple[float, ...]]] = {
    "gradient_norm": lambda found, layer: found.gradient_norms[layer],
    "gradient_squared": lambda found, layer: tuple(norm**2 for norm in found.gradient_norms[layer]),
    "saliency": lambda found, layer: tuple(
        weight * norm for weight, norm in zip(found.weight_norms[layer], found.gradient_norms[layer], strict=True)
    ),
    "approx_fisher": lambda found, layer: tuple(
        norm**2 / (moment + _FISHER_EPSILON)
        for norm, moment in zip(found.gradient_norms[layer], (found.moment_norms or {})[layer], strict=True)
    ),
}


def is_counted(layers: UtilityLayers, matrix: str) -> bool:
    """Whether a matrix of an expert counts, by its role on disk (`up`) or its name in memory (`gate_up_proj`)."""
    return layers == "both" or matrix.startswith("down") == (layers == "fc2")


def scores(utility: str, gradients: ExpertGradients) -> dict[int, tuple[float, ...]]:
    """A utility of each expert, per layer."""
    return {layer: _SCORES[utility](gradients, layer) for layer in gradients.gradient_norms}


@dataclass(frozen=True, kw_only=True)
class UtilityTable:
    """Utilities and where they come from; what utility.json holds."""

    utility: str
    utility_layers: UtilityLayers = "fc1"
    config_hash: str
    """Of the checkpoint that they are of."""
    per_layer: PerLayer
    tokens: Mapping[int, tuple[int, ...]] | None = None
    """Calibration tokens that each expert saw; None where no text was used."""
    batches: int | None = None
    asked: int | None = None
    """Batches that the recipe wanted."""

    @property
    def notices(self) -> tuple[str, ...]:
        """Text that was short, and the experts that saw no token."""
        short = self.batches is not None and self.asked is not None and self.batches < self.asked
        return (
            *([f"the calibration text fills {self.batches} of {self.asked} batches"] if short else []),
            *self._unseen(),
        )

    def _unseen(self) -> tuple[str, ...]:
        unseen = {
            layer: [expert for expert, count in enumerate(counts) if not count]
            for layer, counts in (self.tokens or {}).items()
        }
        return tuple(
            f"layer {layer}: no calibration token reached expert {', '.join(map(str, experts))}, whose utility is 0"
            for layer, experts in unseen.items()
            if experts
        )

    def text(self) -> str:
        """As JSON."""
        layers = {
            str(layer): {"utility": list(values), "tokens": None if self.tokens is None else list(self.tokens[layer])}
            for layer, values in self.per_layer.items()
        }
        record = {
            "format": FORMAT,
            "utility": self.utility,
            "utility_layers": self.utility_layers,
            "config_hash": self.config_hash,
            "batches": self.batches,
            "layers": layers,
        }
        return json.dumps(record, indent=2) + "\n"


def needs_model(plan: ExpandPlan) -> bool:
    """Whether the utilities need gradients."""
    return plan.recipe.utility in GRADIENT_UTILITIES


def find_utilities(plan: ExpandPlan, *, quiet: bool = False) -> UtilityTable | None:
    """The utilities that a plan asks for; None for `uniform`, which needs none.

    Raises:
        MoesaicError: text or a file that cannot be used, a loss that is not finite.
    """
    recipe = plan.recipe
    if recipe.utility_from is not None:
        return _read(Path(recipe.utility_from), plan)
    if recipe.utility == "uniform":
        return None
    name, layers, config_hash = str(recipe.utility), recipe.utility_layers, _config_hash(plan.checkpoint)
    if name == "weight_norm":
        norms = _weight_norms(plan, quiet=quiet)
        return UtilityTable(utility=name, utility_layers=layers, config_hash=config_hash, per_layer=norms)
    gradients = expert_gradients(plan, quiet=quiet)
    return UtilityTable(
        utility=name,
        utility_layers=layers,
        config_hash=config_hash,
        per_layer=scores(name, gradients),
        tokens=gradients.tokens,
        batches=gradients.batches,
        asked=recipe.utility_batches,
    )


def _weight_norms(plan: ExpandPlan, *, quiet: bool) -> dict[int, tuple[float, ...]]:
    """`||w||_2` of the matrices of each expert together, one matrix in memory at a time."""
    layers = plan.recipe.utility_layers
    norms = {}
    with progress(len(plan.model.layers), "layers", label="weight norms", quiet=quiet) as tick:
        for layer in plan.model.layers:
            norms[layer.layer] = tuple(
                _weight_norm(expert_parts(plan.checkpoint, layer, expert), layers)
                for expert in range(layer.num_experts)
            )
            tick(1)
    return norms


def _weight_norm(parts: Parts, layers: UtilityLayers) -> float:
    matrices = [part.read() for role, part in parts.items() if not role.endswith("_bias") and is_counted(layers, role)]
    return norms_of_stacks([matrix.unsqueeze(0) for matrix in matrices])[0]


def _read(path: Path, plan: ExpandPlan) -> UtilityTable:
    """Utilities that an earlier run saved for this model.

    Raises:
        MoesaicError: not such a file, one of another model, or with numbers that are no utilities.
    """
    record = load_json(path)
    if record.get("format") != FORMAT:
        raise MoesaicError(f"--utility-from {path}: is not a utility.json of `moesaic expand`")
    if record.get("config_hash") != _config_hash(plan.checkpoint):
        raise MoesaicError(f"--utility-from {path}: is of a model with another config.json than {plan.checkpoint.name}")
    layers = record.get("layers")
    if not isinstance(layers, dict):
        raise MoesaicError(f"--utility-from {path}: has no layers; compute the utilities again")
    per_layer: dict[int, tuple[float, ...]] = {}
    for layer in plan.model.layers:
        entry = layers.get(str(layer.layer))
        if entry is None and beyond_depth(plan.checkpoint.config, layer.layer):
            continue
        values = entry.get("utility") if isinstance(entry, dict) else None
        if values is None or not _are_utilities(values, layer.num_experts):
            wanted = f"{layer.num_experts} finite numbers that are not negative"
            raise MoesaicError(f"--utility-from {path}: layer {layer.layer} does not have {wanted}; compute them again")
        per_layer[layer.layer] = tuple(values)
    config_hash = _config_hash(plan.checkpoint)
    return UtilityTable(utility=str(record.get("utility")), config_hash=config_hash, per_layer=per_layer)


def _are_utilities(values: Any, count: int) -> bool:
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(type(value) in (int, float) and math.isfinite(value) and value >= 0 for value in values)


def _config_hash(checkpoint: Checkpoint) -> str:
    return source_record(checkpoint, None)["config_hash"]


# --- gradients of a model's experts -----------------------------------------------------------------------------------


def expert_gradients(plan: ExpandPlan, *, quiet: bool = False) -> ExpertGradients:
    """Load the model, read the calibration text and measure.

    Raises:
        MoesaicError: no tokenizer, text without a token to predict, a loss that is not finite.
    """
    from moesaic.loading import load

    batches = calibration_batches(plan, quiet=quiet)
    model = load(plan.checkpoint.path)
    with progress(len(batches), "batches", label="gradients of the experts", quiet=quiet) as tick:
        return measure(model, batches, name=plan.checkpoint.name, layers=plan.recipe.utility_layers, tick=tick)


def measure(
    model: Any,
    batches: Sequence["PackedBatch"],
    *,
    name: str,
    layers: UtilityLayers = "fc1",
    tick: Callable[[float], object] = lambda _: None,
) -> ExpertGradients:
    """Forward and backward of every batch; the loss of a batch is the mean over its predicted tokens.

    Raises:
        NotFiniteError: logits that are not finite.
        MoesaicError: a loss that is not finite.
    """
    from moesaic.modeling.cross_entropy import IGNORED, token_losses
    from moesaic.modeling.finite import watched

    device = next(model.parameters()).device
    packed = keeps_documents_apart(model)
    with watched(model, refuse=name), _watched(model, layers) as experts:
        for batch in batches:
            batch = (batch if packed else one_per_row(batch)).to(device)
            experts.mask_T = (batch.document_ids_BS >= 0).flatten()
            output = model(input_ids=batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False)
            labels_BS = nn.functional.pad(batch.labels_BS[:, 1:], (0, 1), value=IGNORED)
            losses_T, _ = token_losses(output.logits.flatten(0, 1), labels_BS.flatten())
            loss = losses_T.sum() / batch.num_targets
            loss.backward()
            total = loss.item()
            if not math.isfinite(total):
                raise MoesaicError(f"{name}: its loss on the calibration text is {total}; check weights and text")
            tick(1)
        return experts.result(len(batches))


@dataclass(kw_only=True)
class _Watched:
    """Sums over batches while they run."""

    modules: Mapping[int, nn.Module]
    layers: UtilityLayers
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    counts: dict[int, Tensor] = field(default_factory=dict)
    mask_T: Tensor | None = None

    def result(self, batches: int) -> ExpertGradients:
        return ExpertGradients(
            gradient_norms={layer: self._norms(module, batches) for layer, module in self.modules.items()},
            weight_norms={layer: norms_of_stacks(self.matrices(module)) for layer, module in self.modules.items()},
            tokens={layer: tuple(self.counts[layer].tolist()) for layer in self.modules},
            batches=batches,
        )

    def matrices(self, module: nn.Module) -> list[nn.Parameter]:
        """The stacked weight matrices that count, biases left out."""
        return [
            p for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and is_counted(self.layers, name)
        ]

    def _norms(self, module: nn.Module, batches: int) -> tuple[float, ...]:
        sums = [self.sums[matrix] for matrix in self.matrices(module)]
        return tuple(norm / batches for norm in norms_of_stacks(sums))


@contextmanager
def _watched(model: nn.Module, layers: UtilityLayers) -> Iterator[_Watched]:
    """Let gradients flow to the matrices that count only, add them up in fp32 and count the tokens of each expert."""
    modules = {
        int(match["layer"]): module for name, module in model.named_modules() if (match := _EXPERTS.search(name))
    }
    assert modules, "no stacked experts in the model"
    watched = _Watched(modules=modules, layers=layers)
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    hooks = []
    try:
        model.requires_grad_(False)
        for layer, module in modules.items():
            hooks.append(module.register_forward_pre_hook(_counter(watched, layer), with_kwargs=True))
            for matrix in watched.matrices(module):
                watched.sums[matrix] = torch.zeros_like(matrix, dtype=torch.promote_types(matrix.dtype, torch.float32))
                matrix.requires_grad_(True)
                hooks.append(matrix.register_post_accumulate_grad_hook(_adder(watched)))
        yield watched
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, flag in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(flag)


def _adder(watched: _Watched) -> Callable[[Tensor], None]:
    def add(matrix: Tensor) -> None:
        assert isinstance(matrix, nn.Parameter)
        assert matrix.grad is not None
        parts = (tensor.split(_EXPERTS_AT_ONCE) for tensor in (watched.sums[matrix], matrix.grad))
        for total, part in zip(*parts, strict=True):
            total += part
        matrix.grad = None

    return add


def _counter(watched: _Watched, layer: int) -> Callable[..., None]:
    def count(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        values = [*inputs, *keywords.values()]
        ids_TK = next(v for v in values if isinstance(v, Tensor) and not v.is_floating_point())
        assert watched.mask_T is not None
        number = len(watched.matrices(module)[0])
        found = ids_TK.reshape(len(watched.mask_T), -1)[watched.mask_T].flatten().bincount(minlength=number)
        watched.counts[layer] = found + watched.counts.get(layer, 0)

    return count


def norms_of_stacks(stacks: Sequence[Tensor]) -> tuple[float, ...]:
    """Norm over all matrices of each expert, from stacks with the experts in front; in fp32 (fp64 for fp64)."""
    norms_ME = [
        torch.linalg.vector_norm(
            matrix.detach().flatten(1), dim=1, dtype=torch.promote_types(matrix.dtype, torch.float32)
        )
        for matrix in stacks
    ]
    return tuple(torch.stack(norms_ME).square().sum(0).sqrt().tolist())
