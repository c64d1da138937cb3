"""What a rule sees (`RoutingContext`) and what it decides (`RoutingDecision`).

Suffixes: T tokens of the micro-batch (sequences flattened row by row), N its documents, E routed experts, K active.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


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
        boundary counts as two (methods.md, section 2). `first_document` is the number of documents that precede this
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


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingDecision:
    """What one MoE layer decided for the tokens of one micro-batch."""

    logits_TE: Float[Tensor, "tokens experts"]
    """Router logits before any mask, fp32 (or fp64 in an fp64 model)."""
    expert_ids_TK: Int64[Tensor, "tokens active"]
    weights_TK: Float[Tensor, "tokens active"]
    """Weights of the selected experts, from scores without any selection bias."""
    allowed_TE: Bool[Tensor, "tokens experts"] | None = None
    """Experts that the token's document may use; None where all are allowed."""

    @property
    def masked_logits_TE(self) -> Float[Tensor, "tokens experts"]:
        """Logits with -inf outside the pool: what probabilities and the z-loss are computed from."""
        return self.logits_TE if self.allowed_TE is None else mask_logits(self.logits_TE, self.allowed_TE)


def mask_logits(
    logits_TE: Float[Tensor, "tokens experts"], allowed_TE: Bool[Tensor, "tokens experts"]
) -> Float[Tensor, "tokens experts"]:
    """Return logits with -inf for experts that are not allowed (0 would still let them win)."""
    return logits_TE.masked_fill(~allowed_TE, float("-inf"))
