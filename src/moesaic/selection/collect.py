"""One pass over calibration sequences that gives the statistics of every MoE layer.

Letters: T tokens, D hidden, E experts, K active, A token-expert pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.progress import progress
from moesaic.families.identity import SourceModel
from moesaic.families.moe import MoEModel
from moesaic.routing.capture import Routed, find_block, observed, probabilities, replaced_forward
from moesaic.routing.restrict import forward_cut
from moesaic.selection.statistics import SUMS, ExpertStatistics
from moesaic.selection.stream import Batch, LoadedLayer, StreamedModel, make_batches

Choose = Callable[[Sequence[ExpertStatistics]], tuple[int, ...]]
"""From the statistics of one layer, a domain each (as those of a model with this layer alone), to its kept experts."""

_CHUNK_TOKENS = 256
"""Tokens that are added up at once: float64 copies of all would be the largest things in memory."""


def collect_statistics(
    checkpoint: Checkpoint,
    model: MoEModel,
    source: SourceModel,
    sequences: Mapping[str, Sequence[Sequence[int]]],
    *,
    batch_size: int,
    layerwise: Choose | None = None,
    top_k: int | None = None,
    quiet: bool = True,
) -> list[ExpertStatistics]:
    """Run all sequences through the model, layer by layer from disk, and add up what every expert did in each domain.

    Args:
        checkpoint: the model.
        model: its experts.
        source: its identity, recorded in the result.
        sequences: domain -> token ids; each sequence is a document of its own, and its tokens are all counted.
        batch_size: sequences that go through a layer at once; it does not change the result beyond rounding.
        layerwise: choose the experts of a layer, so that the layers after it see what is left of it.
        top_k: active experts of a layer that is cut; default: the model's.
        quiet: print no progress.

    Raises:
        NotFiniteError: a layer gives NaN or infinity, so no expert can be scored by it, or by what comes after.
    """
    batches = {domain: list(make_batches(own, size=batch_size, padding_id=0)) for domain, own in sequences.items()}
    everything = [batch for own in batches.values() for batch in own]
    active = source.top_k if top_k is None else top_k
    layers = checkpoint.config["num_hidden_layers"]
    tokens = sum(len(ids) for own in sequences.values() for ids in own)
    sums: dict[str, list[LayerSums]] = {domain: [] for domain in batches}
    with progress(tokens * layers, unit="tokens", label="scoring", quiet=quiet) as tick:

        def step(layer: LoadedLayer) -> None:
            if layer.index not in source.layers:
                _advance(layer, everything)
            else:
                for domain, own in batches.items():
                    sums[domain].append(LayerSums(source.num_experts, model.family.scoring))
                    _score(layer, own, sums[domain][-1], returns=model.family.returns, advance=layerwise is None)
                if layerwise is not None:
                    alone = replace(source, layers=(layer.index,))
                    kept = layerwise([_statistics(found[-1:], alone, domain) for domain, found in sums.items()])
                    _advance_cut(layer, everything, kept, active)
            tick(tokens)

        StreamedModel(checkpoint).layers(everything, step)
    return [_statistics(found, source, domain) for domain, found in sums.items()]


def _score(layer: LoadedLayer, batches: Sequence[Batch], sums: "LayerSums", *, returns: str, advance: bool) -> None:
    """Add up what the layer does with all batches; and advance them through it, unless it is cut first."""
    with observed(layer.module, returns) as routed:
        for batch in batches:
            output_BSD = layer.run(batch)
            sums.add(routed(), batch.mask_T)
            if advance:
                batch.hidden_BSD = output_BSD


def _advance(layer: LoadedLayer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        batch.hidden_BSD = layer.run(batch)


def _advance_cut(layer: LoadedLayer, batches: Sequence[Batch], kept: tuple[int, ...], top_k: int) -> None:
    """Advance all batches through the layer with only some experts."""
    block = find_block(layer.module)
    assert block is not None
    with replaced_forward(block.router, lambda *given: forward_cut(block.router, *given, kept=kept, top_k=top_k)):
        _advance(layer, batches)


class LayerSums:
    """Sums over tokens that are not padding: float64, and int64 for counts."""

    def __init__(self, num_experts: int, scoring: Literal["softmax", "sigmoid", "unknown"]) -> None:
        self._scoring: Literal["softmax", "sigmoid", "unknown"] = scoring
        self.tokens = 0
        self.counts_E = torch.zeros(num_experts, dtype=torch.int64)
        self.probability_E = torch.zeros(num_experts, dtype=torch.float64)
        self.weighted_norm_E = torch.zeros(num_experts, dtype=torch.float64)
        self.drift_original_E = torch.zeros(num_experts, dtype=torch.float64)
        self.drift_emo_E = torch.zeros(num_experts, dtype=torch.float64)

    def add(self, routed: Routed, mask_T: Bool[Tensor, " tokens"]) -> None:
        """Count the tokens of one batch; `mask_T` is False for padding."""
        for start in range(0, len(mask_T), _CHUNK_TOKENS):
            part = slice(start, start + _CHUNK_TOKENS)
            self._add(routed.select(part).select(mask_T[part]))

    def _add(self, real: Routed) -> None:
        self.tokens += len(real.logits_TE)
        ids_A = real.ids_TK.reshape(-1)
        self.counts_E += ids_A.bincount(minlength=len(self.counts_E))
        self.probability_E += self._probability(real)
        weighted_TK = real.weights_TK.double() * real.norms_TK.double()
        original_T1 = drift(real.residual_TD, real.routed_TD).unsqueeze(-1)
        emo_T1 = drift(real.input_TD, real.output_TD).unsqueeze(-1)
        for total_E, values_TK in (
            (self.weighted_norm_E, weighted_TK),
            (self.drift_original_E, weighted_TK * original_T1),
            (self.drift_emo_E, weighted_TK * emo_T1),
        ):
            total_E.index_add_(0, ids_A, values_TK.reshape(-1))

    def _probability(self, real: Routed) -> Tensor:
        """Sum of the router's probabilities; of its weights, scaled to sum 1, where its rule is not known."""
        if self._scoring != "unknown":
            return probabilities(real.logits_TE, self._scoring).sum(dim=0)
        share_TK = real.weights_TK.double() / real.weights_TK.double().sum(dim=-1, keepdim=True)
        return torch.zeros_like(self.probability_E).index_add_(0, real.ids_TK.reshape(-1), share_TK.reshape(-1))


def drift(
    before_TD: Float[Tensor, "tokens hidden"], change_TD: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, " tokens"]:
    """max(0, 1 - cos(x, x + y)) in float64 (arXiv 2504.06792)."""
    # In fp32, 1 - cos would lose all digits of the small drifts of large models.
    before_TD = before_TD.double()
    return (1.0 - F.cosine_similarity(before_TD, before_TD + change_TD.double(), dim=-1)).clamp_min(0.0)


def _statistics(sums: Sequence[LayerSums], source: SourceModel, domain: str) -> ExpertStatistics:
    names = ("counts_LE", *SUMS)
    arrays: Any = {
        name: torch.stack([getattr(one, name.replace("_LE", "_E")) for one in sums]).numpy() for name in names
    }
    return ExpertStatistics(source=source, domain=domain, tokens=sums[0].tokens, **arrays)
