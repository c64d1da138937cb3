"""A made-up inspection of a million tokens, for the size of the report and how long it takes to write and to open."""

import dataclasses

import numpy as np

from moesaic.analysis.inspection import Document, DomainFacts, Inspection, Reader
from tests.tiny_inspection import tiny_inspection

_READ = 260  # documents that can be read: 26,000 tokens


def large_inspection(
    *, name: str = "./large", layers: int = 32, experts: int = 64, top_k: int = 8, domains: int = 24, seed: int = 0
) -> Inspection:
    """10,000 documents of 100 tokens, by default with the 2,048 features (layers * experts) of issue 6, 32 clusters."""
    draw = np.random.default_rng(seed)
    documents, length = 10_000, 100
    small = tiny_inspection(
        name=name,
        layers=layers,
        experts=experts,
        top_k=top_k,
        domains=tuple(f"domain {index}" for index in range(domains)),
        clusters=32,
        documents=domains,
        document_tokens=4,
        seed=seed,
    )
    share = documents // domains
    facts = tuple(
        DomainFacts(name=domain.name, documents=share, tokens=share * length) for domain in small.data.domains
    )
    words = _words(draw)
    texts = ["".join(words[index] for index in draw.integers(len(words), size=40))[:200] for _ in range(documents)]
    return dataclasses.replace(
        small,
        data=dataclasses.replace(
            small.data, domains=facts, documents=documents, tokens=documents * length, document_tokens=length
        ),
        documents=tuple(
            Document(
                domain=index % domains,
                tokens=length,
                source=f"corpus/file.jsonl:{index + 1}",
                opening=text,
                cluster=index % 32,
                concentration=0.5,
            )
            for index, text in enumerate(texts)
        ),
        statistics=dataclasses.replace(
            small.statistics, token_cluster_T=draw.integers(0, 32, documents * length).astype(np.int16)
        ),
        reader=_reader(draw, words, layers, experts, top_k, length),
    )


def _words(draw: np.random.Generator) -> list[str]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    return [" " + "".join(draw.choice(letters, size)) for size in draw.integers(1, 9, size=6000)]


def _reader(draw: np.random.Generator, words: list[str], layers: int, experts: int, top_k: int, length: int) -> Reader:
    tokens = _READ * length
    scores = draw.random((tokens, layers, experts), dtype=np.float32)
    ids = np.argpartition(-scores, top_k, axis=-1)[..., :top_k]
    weights = np.sort(draw.dirichlet(np.ones(top_k), size=(tokens, layers)), axis=-1)[..., ::-1]
    return Reader(
        documents=tuple(range(_READ)),
        sampled=_READ - 10,
        strings=tuple(words),
        first_token_D1=np.arange(_READ + 1) * length,
        string_R=draw.integers(0, len(words), tokens).astype(np.uint32),
        cluster_R=draw.integers(0, 32, tokens).astype(np.int16),
        ids_RLK=ids.astype(np.uint16),
        weights_RLK=weights.astype(np.float16),
    )
