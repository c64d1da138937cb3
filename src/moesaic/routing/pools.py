"""EMO's document pools: the documents of a micro-batch, the size drawn for each, and the experts each may use.

Suffixes: T tokens of the micro-batch (sequences flattened row by row), N its documents, E routed experts.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from moesaic.common.seeds import draw_integers, fold_key
from moesaic.modeling.modeling_moesaic import probabilities
from moesaic.routing.config import RuleConfig
from moesaic.routing.rules import OwnChoice, RouterSettings, TopK, Weighting


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingContext:
    """The documents of one micro-batch, and what keys their random draws.

    `document_keys_N` must identify a document within the global batch (its index there), whatever rank and micro-batch
    it lands in; `num_documents` is a plain number so that no layer has to ask the device for it.
    """

    document_ids_T: Int64[Tensor, " tokens"]
    """Document of each token, 0..num_documents-1 in any order; -1 is padding, which belongs to no document."""
    num_documents: int
    document_keys_N: Int64[Tensor, " documents"]
    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        assert self.document_ids_T.ndim == 1, "tokens are flattened"
        assert self.document_keys_N.shape == (self.num_documents,), "one key per document"

    @classmethod
    def from_packed(
        cls,
        document_ids_BS: Int64[Tensor, "sequences length"],
        *,
        first_document: int,
        num_documents: int,
        seed: int = 0,
        step: int = 0,
    ) -> "RoutingContext":
        """Take the fields of a `PackedBatch`: ids that are indices in the global batch, consecutive, -1 for padding.

        Never waits for the device.
        """
        ids_T = document_ids_BS.flatten()
        return cls(
            document_ids_T=torch.where(ids_T >= 0, ids_T - first_document, -1),
            num_documents=num_documents,
            document_keys_N=torch.arange(first_document, first_document + num_documents, device=ids_T.device),
            seed=seed,
            step=step,
        )

    @classmethod
    def from_sequences(
        cls,
        document_ids_BS: Int64[Tensor, "sequences length"],
        *,
        first_document: int = 0,
        seed: int = 0,
        step: int = 0,
        device: torch.device | str | None = None,
    ) -> "RoutingContext":
        """Number the documents of packed sequences whose ids are only unique within a sequence.

        A document is a run of one id within one sequence; negative ids are padding; a document cut by a sequence
        boundary counts as two (docs/routing.md). `first_document` is the number of documents that precede this
        micro-batch in the global batch. Counting waits for the device, so pass the batch while it is on the CPU and let
        `device` say where the context shall live.
        """
        previous_BS = torch.full_like(document_ids_BS, -1)
        previous_BS[:, 1:] = document_ids_BS[:, :-1]
        real_BS = document_ids_BS >= 0
        starts_BS = real_BS & (document_ids_BS != previous_BS)
        number_T = starts_BS.flatten().cumsum(0) - 1
        num_documents = int(starts_BS.sum())
        keys_N = torch.arange(first_document, first_document + num_documents, device=document_ids_BS.device)
        return cls(
            document_ids_T=torch.where(real_BS.flatten(), number_T, -1).to(device),
            num_documents=num_documents,
            document_keys_N=keys_N.to(device),
            seed=seed,
            step=step,
        )

    @cached_property
    def token_mask_T(self) -> Bool[Tensor, " tokens"]:
        """True for tokens that are not padding."""
        return self.document_ids_T >= 0

    @cached_property
    def segments_T(self) -> Int64[Tensor, " tokens"]:
        """Document of each token with padding as one more document, number `num_documents`."""
        return torch.where(self.token_mask_T, self.document_ids_T, self.num_documents)

    @cached_property
    def lengths_N(self) -> Int64[Tensor, " documents"]:
        """Tokens of each document, at least 1."""
        lengths = torch.zeros(self.num_documents + 1, dtype=torch.int64, device=self.segments_T.device)
        lengths.index_add_(0, self.segments_T, torch.ones_like(self.segments_T))
        return lengths[: self.num_documents].clamp_min(1)


class DocumentPool(TopK):
    """EMO: plain top-k among the experts of the token's document (in training), and among all at inference."""

    needs_documents = True

    def __init__(self, config: RuleConfig, settings: RouterSettings) -> None:
        super().__init__(config, settings)
        config.refuse_groups(settings.groups)
        self.low, self.high = config.pool_range(top_k=settings.top_k, num_experts=settings.num_experts)
        self.per_layer = config.pool_draw == "document_and_layer"

    def allow(
        self, logits_TE: Tensor, context: "RoutingContext", layer: int, bias_E: Tensor | None
    ) -> Bool[Tensor, "tokens experts"]:
        """The experts of each token's document."""
        sizes_N = draw_pool_sizes(context, self.low, self.high, layer=layer if self.per_layer else None)
        pools_NE = document_pools(logits_TE, context, sizes_N, bias_E, self.settings.weighting, self.settings.own)
        return token_pools(pools_NE, context)


def draw_pool_sizes(context: RoutingContext, low: int, high: int, *, layer: int | None) -> Int64[Tensor, " documents"]:
    """Draw the pool size of each document uniformly from {low..high} (EMO, section 3.3).

    A function of (seed, step, layer, document's key) and nothing else; `layer` None shares the draw across layers.
    """
    if low == high:
        return torch.full_like(context.document_keys_N, low)
    stream = fold_key(context.seed, context.step, -1 if layer is None else layer)
    return draw_integers(context.document_keys_N, low, high, stream=stream)


@torch.no_grad()
def document_pools(
    logits_TE: Float[Tensor, "tokens experts"],
    context: RoutingContext,
    sizes_N: Int64[Tensor, " documents"],
    bias_E: Float[Tensor, " experts"] | None = None,
    weighting: Weighting = "selected",
    own: OwnChoice | None = None,
) -> Bool[Tensor, "documents experts"]:
    """Return the experts of each document's pool (EMO, equation of section 3.2).

    mean_NE[n] = 1 / |n| * sum of p_TE[t] over the tokens t of document n, where p are the router's probabilities
    (softmax over all routed experts; of sigmoid weights the sigmoids over their sum). A pool is the `sizes_N[n]`
    experts with the largest mean, the lower id first among equals. Padding is in no document. The whole document
    decides, so routing in training is not causal; no gradient flows through the choice. A selection bias counts here as
    in the selection: an expert outside every pool could not be helped by it otherwise. Of a family with a choice of its
    own, p is what its tokens choose by, sigmoids as they are, with their bias.
    """
    value_TE = probabilities(logits_TE, weighting) if own is None else own.values(logits_TE, bias_E)
    sums_NE = value_TE.new_zeros(context.num_documents + 1, logits_TE.shape[-1])
    sums_NE.index_add_(0, context.segments_T, value_TE)
    mean_NE = sums_NE[:-1] / context.lengths_N[:, None]
    if bias_E is not None and own is None:
        mean_NE = mean_NE + bias_E
    order_NE = mean_NE.argsort(dim=-1, descending=True, stable=True)
    kept_NE = torch.arange(logits_TE.shape[-1], device=logits_TE.device) < sizes_N[:, None]
    return torch.zeros_like(kept_NE).scatter_(1, order_NE, kept_NE)


def token_pools(pools_NE: Bool[Tensor, "documents experts"], context: RoutingContext) -> Bool[Tensor, "tokens experts"]:
    """Return the pool of each token's document; padding may use every expert (it is routed, and counted nowhere)."""
    all_experts_1E = pools_NE.new_ones(1, pools_NE.shape[-1])
    return torch.cat([pools_NE, all_experts_1E])[context.segments_T]
