"""The packed batch: what a model, a routing rule and a loss need to know about a stretch of documents."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """Sequences of documents packed one after the other. B sequences, S tokens each, all tensors int64 on the CPU.

    A document that the end of a sequence cuts counts as two documents: each piece has its own id and its own positions
    (a validation document longer than a sequence keeps one id over its pieces, which lie in different sequences).

    Labels are *unshifted*, as Hugging Face models expect them: the logits at t-1 are compared with `labels[:, t]`. The
    label of the first token of every piece is -100, so that no document is ever predicted from the one before.
    Prompts that are not trained on and padding are -100 too. Padding is a document of its own, with id and domain -1.
    """

    input_ids_BS: Int64[Tensor, "sequences length"]
    """Token ids; padding holds the padding token."""
    labels_BS: Int64[Tensor, "sequences length"]
    """Unshifted labels, -100 where nothing is to be predicted."""
    position_ids_BS: Int64[Tensor, "sequences length"]
    """Restart at 0 at every piece, padding included."""
    document_ids_BS: Int64[Tensor, "sequences length"]
    """Index of the document in the *global* batch of the step (in validation: in the validation set), however that
    batch is cut into ranks and micro-steps; -1 for padding. The ids of a batch are consecutive:
    `document_ids_BS - first_document` is a dense index below `num_documents`."""
    domain_ids_BS: Int64[Tensor, "sequences length"]
    """Index into `DataRecipe.domains`; -1 for padding."""
    first_document: int
    """The smallest document id of this batch (0 where the batch is all padding)."""
    num_documents: int
    """Documents in this batch, padding not counted."""

    @property
    def num_targets(self) -> int:
        """Labels that a Hugging Face model predicts in this batch (those in column 0 are never predicted)."""
        return int((self.labels_BS[:, 1:] != -100).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids_BS >= 0).sum())

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch with its tensors on `device`."""
        return PackedBatch(
            input_ids_BS=self.input_ids_BS.to(device, non_blocking=True),
            labels_BS=self.labels_BS.to(device, non_blocking=True),
            position_ids_BS=self.position_ids_BS.to(device, non_blocking=True),
            document_ids_BS=self.document_ids_BS.to(device, non_blocking=True),
            domain_ids_BS=self.domain_ids_BS.to(device, non_blocking=True),
            first_document=self.first_document,
            num_documents=self.num_documents,
        )
