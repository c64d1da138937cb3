"""Tiny MoE checkpoints with a tokenizer, and texts to look into them with."""

import json
from pathlib import Path

import numpy as np

from moesaic.analysis.documents import Sample, Text
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, write_documents


def save_model(folder: Path, family: str = "olmoe", **options: object) -> Path:
    """A tiny model of a family, with the tokenizer of characters."""
    save_tiny_moe(folder, family, **options)  # pyright: ignore[reportArgumentType]
    return save_tokenizer(folder)


def write_domains(path: Path, domains: tuple[str, ...] = ("code", "math"), *, number: int = 20) -> Path:
    """One file with a field `domain`."""
    lines = []
    for domain in domains:
        own = write_documents(path.with_name(f"{domain}.part"), domain, number=number, seed=0)
        lines += [json.dumps(json.loads(line) | {"domain": domain}) for line in own.read_text().splitlines()]
        own.unlink()
    path.write_text("\n".join(lines) + "\n")
    return path


def made_up_sample(lengths: list[int], domains: list[int], *, vocabulary: int = 12, seed: int = 0) -> Sample:
    """A sample of random tokens with documents of these lengths and (rising) domains."""
    draw = np.random.default_rng(seed)
    texts = tuple(
        Text(
            domain=f"domain{domain}",
            source=f"data:{index}",
            place=int(draw.integers(1 << 40)),
            ids=(ids := draw.integers(0, vocabulary, length).astype(np.uint32)),
            text="x" * length,
            stops=np.arange(1, length + 1, dtype=np.int32),
            similar_ids=ids,
        )
        for index, (length, domain) in enumerate(zip(lengths, domains, strict=True))
    )
    return Sample(
        domains=tuple(f"domain{domain}" for domain in sorted(set(domains))),
        documents=texts,
        start_D1=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        domain_D=np.array(domains, dtype=np.int64),
        records=len(texts),
        too_short=0,
        too_long=0,
    )
