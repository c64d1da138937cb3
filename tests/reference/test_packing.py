"""The packed batches against a naive packer: one token after the other, plain lists, no arrays."""

from pathlib import Path

import numpy as np
import pytest

from moesaic.data.cache import Document, write_cache
from moesaic.data.dataset import PackedDataset
from moesaic.data.mixing import DocumentStream, Schedule, integer_shares
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import PreparedData

PADDING = 0


def naive_stream(documents: list[list[int]], masked: list[set[int]], seed: int, stream: int, num_tokens: int) -> list:
    """(token, masked, starts a document) one by one; only the order of the documents is taken from the code."""
    offsets = np.cumsum([0, *map(len, documents)])
    order = DocumentStream(offsets, seed=seed, stream=stream)
    out = []
    epoch = 0
    while len(out) < num_tokens:
        begins = order.pieces(epoch * offsets[-1], (epoch + 1) * offsets[-1]).begin_N
        for begin in begins:
            (document,) = [index for index in range(len(documents)) if offsets[index] == begin]
            for place, token in enumerate(documents[document]):
                out.append((token, place in masked[document], place == 0))
        epoch += 1
    return out[:num_tokens]


def naive_step(streams: list[list], sources: list[int], step: int, sequences: int, length: int) -> list[list[dict]]:
    """All cells of a step, sequence by sequence, after walking through all sequences before it."""
    taken = [0] * len(streams)
    rows = []
    document = -1
    for number in range((step + 1) * sequences):
        source = sources[number]
        tokens = streams[source][taken[source] : taken[source] + length]
        taken[source] += len(tokens)
        if number == step * sequences:
            document = -1
        row, position = [], 0
        for column in range(length):
            if column >= len(tokens):
                position = position + 1 if row and row[-1]["document"] == -1 else 0
                row.append({"token": PADDING, "label": -100, "position": position, "document": -1, "domain": -1})
                continue
            token, is_masked, starts = tokens[column]
            starts = starts or column == 0
            document += starts
            position = 0 if starts else position + 1
            label = -100 if starts or is_masked else token
            row.append({"token": token, "label": label, "position": position, "document": document, "domain": source})
        rows.append(row)
    return rows[step * sequences :]


@pytest.mark.parametrize("epochs", [None, 2])
@pytest.mark.parametrize("trial", range(6))
def test_every_cell_of_every_step(tmp_path: Path, trial: int, epochs: int | None) -> None:
    rng = np.random.default_rng(trial)
    length, sequences, seed = int(rng.integers(2, 20)), int(rng.integers(1, 7)), int(rng.integers(100))
    weights = [1.0, 1.0, 1.0] if epochs else rng.choice([0.5, 1.0, 1.5, 4.0], 3).tolist()
    folders, corpora, masks = [], [], []
    for index in range(3):
        documents = [rng.integers(1, 1000, rng.integers(1, 30)).tolist() for _ in range(rng.integers(1, 12))]
        masked = [tuple({(0, int(rng.integers(1, len(ids) + 1)))} if rng.random() < 0.5 else ()) for ids in documents]
        corpora.append(documents)
        masks.append([{place for start, stop in spans for place in range(start, stop)} for spans in masked])
        made = [Document(ids=np.array(ids), masked=spans) for ids, spans in zip(documents, masked, strict=True)]
        folders.append(write_cache(tmp_path / str(index), made, vocab_size=1000, meta={}).folder)
    sources = tuple(SourceRecipe(path="x", domain=str(index), weight=weights[index]) for index in range(3))
    recipe = DataRecipe(sequence_length=length, sources=sources, epochs=epochs)
    data = PreparedData(recipe=recipe, sources=tuple(folders), validation=(), padding_id=PADDING)
    dataset = PackedDataset(data, seed=seed, sequences_per_step=sequences)

    num_steps = dataset.num_steps or 8
    sizes = [sum(map(len, documents)) for documents in corpora]
    wanted = [num_steps * sequences * length if epochs is None else epochs * size for size in sizes]
    streams = [naive_stream(corpora[i], masks[i], seed, i, wanted[i]) for i in range(3)]
    shares = integer_shares(weights) if epochs is None else [-(-epochs * size // length) for size in sizes]
    schedule = Schedule(shares).assign(np.arange(num_steps * sequences))[0].tolist()
    for step in range(num_steps):
        expected = naive_step(streams, schedule, step, sequences, length)
        batch = dataset.batch(step)
        found = {
            "token": batch.input_ids_BS,
            "label": batch.labels_BS,
            "position": batch.position_ids_BS,
            "document": batch.document_ids_BS,
            "domain": batch.domain_ids_BS,
        }
        for name, tensor in found.items():
            assert tensor.tolist() == [[cell[name] for cell in row] for row in expected], (step, name)
