"""Perplexity and bits per byte of held-out text, document by document, per domain and per source.

Every document begins anew after the tokenizer's start token (or its end token where it has no start), as in lm-eval's
rolling likelihood, so all of its tokens are predicted and its bits are those of all of its bytes. A document longer
than the window goes on in the next one, whose first token sees only the token before it, but for the last one, which
reaches back over a whole window. Each window is a row of its own, so nothing of one document is seen from another,
whatever the model's attention does with packed rows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import progress
from moesaic.data.calibration import record_digest
from moesaic.data.files import DataFile, find_files, read_records, rows_file
from moesaic.data.recipe import SourceRecipe
from moesaic.data.vocabulary import refuse_unknown_ids
from moesaic.evaluation.local import DataMissingError
from moesaic.evaluation.own import HeldOutText
from moesaic.families.counting import trained_context
from moesaic.modeling.cross_entropy import IGNORED, ratio_with_error, token_losses

WINDOW = 2048
"""Most tokens that are predicted at once; a model that reaches less far has smaller windows."""
_POSITIONS = 8192  # in one batch, padding included

_MOST_NATS = 709.0
"""exp of more is no float64."""

_HELD_OUT = (".valid", ".validation", ".test", ".heldout", ".held_out")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One held-out text."""

    text: str
    domain: str
    source: str


def held_out_files(folder: Path) -> tuple[DataFile, ...]:
    """The files of a folder whose names say that they are held out, or all of them where none does.

    Raises:
        DataMissingError: there are none.
    """
    try:
        files = find_files(SourceRecipe(path=str(folder), domain="held-out"), quiet=True)
    except MoesaicError as error:
        raise DataMissingError(str(error)) from error
    marked = tuple(file for file in files if any(mark in file.path.name.lower() for mark in _HELD_OUT))
    return marked or files


def files_of(text: HeldOutText, data_dir: str | None) -> tuple[DataFile, ...]:
    """The files of a task's held-out text: its own, or those of the folder with the data.

    Raises:
        DataMissingError: there are none.
    """
    if text.path is not None:
        return (rows_file(text.path),)
    if data_dir is None:
        raise DataMissingError("held-out text is local; give --data-dir")
    return held_out_files(Path(data_dir))


def read_documents(
    files: Sequence[DataFile],
    *,
    domain_field: str,
    text_field: str = "text",
    source_field: str = "source",
    limit: int | None = None,
) -> list[Document]:
    """The documents of all files, empty ones left out; of each domain the first `limit`.

    Raises:
        MoesaicError: a record without text or without the domain's field; no document.
    """
    documents: list[Document] = []
    counts: dict[str, int] = {}
    for file in files:
        for record in read_records(file, None, lambda _amount: None):
            text, domain = record.fields.get(text_field), _domain(record.fields, domain_field, file, record.where)
            if not isinstance(text, str):
                raise MoesaicError(
                    f"{record.where}: no field {text_field!r} with the held-out text; perplexity needs one"
                )
            if domain == "all":
                raise MoesaicError(
                    f"{record.where}: the domain is called 'all', as the total over domains is; rename it"
                )
            counts[domain] = counts.get(domain, 0) + 1
            if text and (limit is None or counts[domain] <= limit):
                source = str(record.fields.get(source_field, file.path.name))
                documents.append(Document(text=text, domain=domain, source=source))
    if not documents:
        raise MoesaicError(f"{files[0].path.parent}: no document has any text; perplexity needs at least one")
    return documents


def digests_of(file: DataFile) -> list[str]:
    """The digest of every record of a file."""
    return [record_digest(record.fields) for record in read_records(file, None, lambda _amount: None)]


def _domain(fields: Mapping[str, Any], name: str, file: DataFile, where: str) -> str:
    if name == "":
        return file.path.name.partition(".")[0]
    if name not in fields:
        raise MoesaicError(
            f"{where}: no field {name!r} with the domain (the record has {', '.join(map(str, fields))}); "
            "name it with --domain-field, or take the file's name with --domain-field ''"
        )
    return str(fields[name])


def measure(
    model: Any, tokenizer: Any, documents: Sequence[Document], *, batch_size: int, quiet: bool
) -> dict[str, Any]:
    """Losses over all documents, and by domain and by source.

    Returns:
        `all`, `domains`, `sources` (what `text_loss` gives, each), `window`, the tokens of one, and `rows`: the domain,
        loss (sum, nats), tokens and bytes of every document, and a hash of their texts.
    """
    window = _window(model)
    losses_N, tokens_N = document_losses(
        model, tokenizer, [document.text for document in documents], batch_size=batch_size, window=window, quiet=quiet
    )
    bytes_N = torch.tensor([len(document.text.encode()) for document in documents], dtype=torch.float64)

    def over(rows: list[int]) -> dict[str, Any]:
        return text_loss(losses_N[rows], tokens_N[rows], bytes_N[rows])

    def by(names: list[str]) -> dict[str, Any]:
        return {name: over([row for row, other in enumerate(names) if other == name]) for name in sorted(set(names))}

    return {
        "all": over(list(range(len(documents)))),
        "domains": by([document.domain for document in documents]),
        "sources": by([document.source for document in documents]),
        "window": window,
        "rows": {
            "hash": xxhash.xxh3_128("\0".join(document.text for document in documents).encode()).hexdigest(),
            "domains": [document.domain for document in documents],
            "losses": losses_N.tolist(),
            "tokens": tokens_N.long().tolist(),
            "bytes": bytes_N.long().tolist(),
        },
    }


def text_loss(losses_N: Tensor, tokens_N: Tensor, bytes_N: Tensor) -> dict[str, Any]:
    """Loss of N documents from the sums of each, in nats, for the results file.

    `loss` is total nats over total tokens; `bits_per_byte` total bits over total bytes of UTF-8, comparable between
    tokenizers. Their standard errors have documents as the units that were drawn; None for a single one.
    """
    per_token = ratio_with_error(losses_N, tokens_N)
    per_byte = ratio_with_error(losses_N, bytes_N)
    to_bits = 1 / math.log(2)
    error = per_byte.standard_error
    return {
        "loss": per_token.loss,
        "standard_error": per_token.standard_error,
        "perplexity": math.exp(per_token.loss) if per_token.loss < _MOST_NATS else math.inf,
        "bits_per_byte": per_byte.loss * to_bits,
        "bits_per_byte_error": None if error is None else error * to_bits,
        "documents": per_token.documents,
        "tokens": per_token.tokens,
        "bytes": per_byte.tokens,
    }


@torch.no_grad()
def document_losses(
    model: Any, tokenizer: Any, texts: Sequence[str], *, batch_size: int, window: int, quiet: bool = True
) -> tuple[Tensor, Tensor]:
    """Sum of the losses (nats) of each text, and how many tokens it has; float64, on the CPU."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise MoesaicError("perplexity: the tokenizer has no start and no end token to put before a document")
    windows: list[tuple[int, list[int], list[int]]] = []
    tokens_N = torch.zeros(len(texts), dtype=torch.float64)
    vocabulary = model.config.get_text_config().vocab_size
    for number, text in enumerate(texts):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"]]
        refuse_unknown_ids(max(ids, default=0), vocabulary, tokenizer.name_or_path)
        tokens_N[number] = len(ids)
        windows += [(number, *pair) for pair in cut(ids, start, window)]
    windows.sort(key=lambda one: -len(one[1]))
    losses_N = torch.zeros(len(texts), dtype=torch.float64)
    with progress(float(tokens_N.sum()), unit="tokens", label="perplexity", quiet=quiet) as tick:
        for batch in _batches(windows, batch_size):
            losses_N.index_add_(0, torch.tensor([number for number, _, _ in batch]), _losses(model, batch))
            tick(sum(len(targets) for _, _, targets in batch))
    return losses_N, tokens_N


def cut(ids: Sequence[int], start: int, window: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of each window: every token is a target once; the targets are what the last inputs predict.

    >>> cut([5, 6, 7], 1, 2)
    [([1, 5], [5, 6]), ([5, 6], [7])]
    """
    before = [start, *ids]
    ends = [min(begin + window, len(ids)) for begin in range(0, len(ids), window)]
    return [(before[max(0, end - window) : end], list(ids[number * window : end])) for number, end in enumerate(ends)]


def _batches(
    windows: Sequence[tuple[int, list[int], list[int]]], batch_size: int
) -> Iterator[Sequence[tuple[int, list[int], list[int]]]]:
    begin = 0
    while begin < len(windows):
        rows = max(1, min(batch_size, _POSITIONS // len(windows[begin][1])))
        yield windows[begin : begin + rows]
        begin += rows


def _losses(model: Any, batch: Sequence[tuple[int, list[int], list[int]]]) -> Tensor:
    """Sum of the losses of each row. Padding is on the right, where no token of the text sees it."""
    width = max(len(inputs) for _, inputs, _ in batch)
    inputs_BT = torch.tensor([[*inputs, *[0] * (width - len(inputs))] for _, inputs, _ in batch])
    labels_BT = torch.full((len(batch), width), IGNORED)
    for row, (_, inputs, targets) in enumerate(batch):
        labels_BT[row, len(inputs) - len(targets) : len(inputs)] = torch.tensor(targets)
    logits_BTV = model(input_ids=inputs_BT.to(model.device), use_cache=False).logits
    losses_T, _ = token_losses(logits_BTV.flatten(0, 1), labels_BT.flatten().to(model.device))
    return losses_T.double().view(labels_BT.shape).sum(1).cpu()


def _window(model: Any) -> int:
    return min(WINDOW, trained_context(model.config) or WINDOW)
