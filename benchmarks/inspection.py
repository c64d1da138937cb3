"""Time and memory of `moesaic inspect`: capture against a plain forward, and clustering a million tokens.

    python benchmarks/inspection.py capture
    python benchmarks/inspection.py make FOLDER [--tokens 1000000]
    python benchmarks/inspection.py cluster FOLDER

`make` writes a capture of made-up router logits (16 layers of 125 experts: 2,000 features), 4 GB for a million tokens;
`cluster` is what is timed. Not named inspect.py: Python's own modules would import it in place of theirs.
"""

import argparse
import resource
import statistics
import time
from pathlib import Path

import numpy as np

LAYERS, EXPERTS, ACTIVE = 16, 125, 8
TOPICS, TOPIC_STD, LATENT, LATENT_STD, NOISE_STD = 48, 1.0, 64, 0.12, 0.3
BLOCK = 8192


def make(folder: Path, tokens: int) -> None:
    """Logits: a topic per document of 100 tokens, a few dozen further directions, and noise of its own per feature."""
    from moesaic.analysis.capture import create_tokens

    folder.mkdir()
    draw = np.random.default_rng(0)
    width = LAYERS * EXPERTS
    topics = draw.standard_normal((TOPICS, width), dtype=np.float32) * TOPIC_STD
    basis = draw.standard_normal((LATENT, width), dtype=np.float32) * LATENT_STD
    noise = draw.standard_normal((BLOCK + 4096, width), dtype=np.float32) * NOISE_STD
    with create_tokens(folder / "logits.npy", (tokens, LAYERS, EXPERTS), np.dtype(np.float16)) as file:
        for start in range(0, tokens, BLOCK):
            rows = min(BLOCK, tokens - start)
            topic = np.repeat(draw.integers(0, TOPICS, rows // 100 + 1), 100)[:rows]
            latent = draw.standard_normal((rows, LATENT), dtype=np.float32)
            shift = int(draw.integers(0, 4096))
            logits = topics[topic] + latent @ basis + noise[shift : shift + rows]
            file.write(start, logits.astype(np.float16).reshape(rows, LAYERS, EXPERTS))


def cluster(folder: Path) -> None:
    """Everything from stored logits to clusters, silhouette and mean probabilities per cluster."""
    import torch

    from moesaic.analysis.capture import Capture, open_tokens
    from moesaic.analysis.clusters import TokenClusters, cluster_tokens, features

    with open_tokens(folder / "logits.npy") as logits:
        capture = Capture(logits=logits, ids=logits, weights=logits)
        # In `inspect` the mean comes from the pass that measures health; it is timed here all the same.
        start = time.perf_counter()
        mean = sum(block.sum(axis=0, dtype=np.float64) for block in features(capture, "softmax")) / logits.shape[0]
        after_mean = time.perf_counter()
        found = cluster_tokens(capture, "softmax", np.asarray(mean), folder / "rows.npy", seed=0)
        seconds = time.perf_counter() - after_mean
    assert isinstance(found, TokenClusters), found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{logits.shape[0]:,} tokens of {LAYERS * EXPERTS} features: mean {after_mean - start:.1f} s, clustering "
        f"{seconds:.1f} s, peak {peak:.2f} GB, {found.components.axes_FP.shape[1]} components, "
        f"{found.clusters.iterations} iterations, silhouette {found.silhouette:.3f}, {torch.get_num_threads()} threads"
    )


def capture_cost(documents: int, rounds: int) -> None:
    """A capture and the same forward passes without it, alternating."""
    import tempfile

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from moesaic.analysis import capture as capturing
    from moesaic.analysis.documents import Sample, Text

    settings = AutoConfig.for_model(
        "olmoe",
        hidden_size=768,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=8192,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    draw = np.random.default_rng(0)
    texts = tuple(
        Text(
            domain="d",
            source="",
            place=index,
            ids=(ids := draw.integers(0, 8192, 100, dtype=np.uint32)),
            text="",
            stops=np.full(100, -1, dtype=np.int32),
            similar_ids=ids,
        )
        for index in range(documents)
    )
    sample = Sample(
        domains=("d",),
        documents=texts,
        start_D1=np.arange(documents + 1) * 100,
        domain_D=np.zeros(documents, dtype=np.int64),
        records=documents,
        too_short=0,
        too_long=0,
    )
    shape = capturing.RouterShape(layers=tuple(range(8)), experts=64, active=8)
    plain, kept = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for index in range(rounds + 1):
            start = time.perf_counter()
            with torch.inference_mode():
                for _, ids_BS in capturing.batches(sample, 16):
                    model.base_model(input_ids=ids_BS, use_cache=False)
            middle = time.perf_counter()
            place = Path(scratch, str(index))
            capturing.capture(model, sample, shape, place, scoring="softmax", batch_size=16, quiet=True)
            if index:  # the first round warms up
                plain.append(middle - start)
                kept.append(time.perf_counter() - middle)
    ratio = statistics.median(kept) / statistics.median(plain)
    print(
        f"{sample.tokens:,} tokens, 8 layers of 64 experts: forward {statistics.median(plain):.2f} s, with capture "
        f"{statistics.median(kept):.2f} s, ratio {ratio:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("capture", "make", "cluster"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.part == "capture":
        capture_cost(options.documents, options.rounds)
    elif options.folder is None:
        parser.error(f"{options.part} needs a FOLDER")
    elif options.part == "make":
        make(options.folder, options.tokens)
    else:
        cluster(options.folder)


if __name__ == "__main__":
    main()
