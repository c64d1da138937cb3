"""One pass over calibration sequences that gives the statistics of every MoE layer."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from moesaic.checkpoint.source import Checkpoint
from moesaic.common.progress import progress
from moesaic.families.moe import MoEModel
from moesaic.selection.experts import find_block, replaced_forward
from moesaic.selection.measure import LayerSums, Scoring, observed
from moesaic.selection.restriction import forward_cut
from moesaic.selection.source import SourceModel
from moesaic.selection.statistics import ExpertStatistics
from moesaic.selection.streaming import Batch, LoadedLayer, StreamedModel, make_batches

Choose = Callable[[ExpertStatistics], tuple[int, ...]]
"""From the statistics of one layer (as those of a model with this layer alone) to its kept experts."""


def capture(
    checkpoint: Checkpoint,
    model: MoEModel,
    source: SourceModel,
    sequences: Sequence[Sequence[int]],
    *,
    domain: str,
    batch_size: int,
    layerwise: Choose | None = None,
    top_k: int | None = None,
    quiet: bool = True,
) -> ExpertStatistics:
    """Run all sequences through the model, layer by layer from disk, and add up what every expert did.

    Args:
        checkpoint: the model.
        model: its experts.
        source: its identity, recorded in the result.
        sequences: token ids; each is a document of its own, and its tokens are all counted.
        domain: recorded in the result.
        batch_size: sequences that go through a layer at once; it does not change the result beyond rounding.
        layerwise: choose the experts of a layer, so that the layers after it see what is left of it.
        top_k: active experts of a layer that is cut; default: the model's.
        quiet: print no progress.
    """
    batches = list(make_batches(sequences, size=batch_size, padding_id=0))
    run = _Run(model=model, source=source, batches=batches, domain=domain, layerwise=layerwise, top_k=top_k)
    total = sum(len(ids) for ids in sequences) * checkpoint.config["num_hidden_layers"]
    with progress(total, unit="tokens", label="scoring", quiet=quiet) as tick:

        def step(layer: LoadedLayer) -> None:
            run.step(layer)
            tick(total / checkpoint.config["num_hidden_layers"])

        StreamedModel(checkpoint).layers(batches, step)
    return _statistics(run.sums, source, domain)


class _Run:
    def __init__(
        self,
        *,
        model: MoEModel,
        source: SourceModel,
        batches: Sequence[Batch],
        domain: str,
        layerwise: Choose | None,
        top_k: int | None,
    ) -> None:
        self._scoring: Scoring = cast(Scoring, model.family.scoring)
        self._source = source
        self._batches = batches
        self._domain = domain
        self._choose = layerwise
        self._top_k = source.top_k if top_k is None else top_k
        self.sums: list[LayerSums] = []

    def step(self, layer: LoadedLayer) -> None:
        """Score a layer and advance all batches through it."""
        if layer.index not in self._source.layers:
            _advance(layer, self._batches)
            return
        sums = LayerSums(self._source.num_experts, self._scoring)
        self.sums.append(sums)
        with observed(layer.module) as observer:
            for batch in self._batches:
                output_BSD = layer.run(batch)
                sums.add(observer.routed(), batch.mask_T)
                if self._choose is None:
                    batch.hidden_BSD = output_BSD
        if self._choose is not None:
            self._advance_cut(layer, self._choose(_layer_statistics(sums, self._source, layer.index, self._domain)))

    def _advance_cut(self, layer: LoadedLayer, kept: tuple[int, ...]) -> None:
        """Advance all batches through the layer with only some experts."""
        block = find_block(layer.module)
        assert block is not None
        with replaced_forward(
            block.router, lambda hidden_states: forward_cut(block.router, hidden_states, kept, self._top_k)
        ):
            _advance(layer, self._batches)


def _advance(layer: LoadedLayer, batches: Sequence[Batch]) -> None:
    for batch in batches:
        batch.hidden_BSD = layer.run(batch)


def _layer_statistics(sums: LayerSums, source: SourceModel, layer: int, domain: str) -> ExpertStatistics:
    alone = replace(source, layers=(layer,))
    return _statistics([sums], alone, domain)


def _statistics(sums: Sequence[LayerSums], source: SourceModel, domain: str) -> ExpertStatistics:
    def rows(name: str) -> np.ndarray:
        return torch.stack([getattr(one, name) for one in sums]).numpy()

    return ExpertStatistics(
        source=source,
        domain=domain,
        tokens=sums[0].tokens,
        counts_LE=rows("counts_E"),
        probability_LE=rows("probability_E"),
        weighted_norm_LE=rows("weighted_norm_E"),
        drift_original_LE=rows("drift_original_E"),
        drift_emo_LE=rows("drift_emo_E"),
    )
