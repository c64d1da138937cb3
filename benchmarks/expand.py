"""`expand` without data against a plain copy, and its gradients against the passes that they need.

    python benchmarks/expand.py copying [--repeats 3] [--work DIR]
    python benchmarks/expand.py gradients [--repeats 3] [--work DIR]

- copying: random bf16 weights with the shapes of Qwen3-30B-A3B, two layers, vocabulary 32,768, 2.7 GB; 128 experts
  become 192, uniformly. Against `cp` of the bytes written (into the page cache, and synced to the disk) and the start
  of an interpreter with torch.
- gradients: a smaller model of the same family (hidden 1024, four layers, 64 experts of 512, top-8), 4 batches of 8
  sequences of 512 tokens: what `--calibration` does for utilities, against forward and backward passes over the same
  batches whose gradients (of the experts' matrices alone) are left to add up in the checkpoint's own type.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import MOESAIC, VOCABULARY, best, prepared, start_command, weight_bytes

BATCHES, SEQUENCES, LENGTH = 4, 8, 512


def copying(moe: Path, work: Path, repeats: int) -> None:
    """Expand, copy what was written, start an interpreter."""
    out, copy = work / "larger", work / "copy"
    start = best(start_command(), repeats=repeats)
    ours = best([MOESAIC, "expand", str(moe), str(out), "--experts", "192", "--quiet"], repeats=repeats, fresh=out)
    plain = best(["cp", "-r", str(out), str(copy)], repeats=repeats, fresh=copy)
    synced = ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(out), str(copy)]  # as durable as what expand leaves
    durable = best(synced, repeats=repeats, fresh=copy)
    print(f"{weight_bytes(moe) / 1e9:.2f} GB become {weight_bytes(out) / 1e9:.2f} GB; best of {repeats}")
    print(f"{'':28} {'seconds':>8} {'peak GB':>8}")
    rows = (
        ("moesaic expand", ours),
        ("interpreter and torch", start),
        ("plain copy (cp)", plain),
        ("copy and sync", durable),
    )
    for name, run in rows:
        print(f"{name:28} {run.seconds:8.2f} {run.peak_gb:8.2f}")
    for name, run in rows[2:]:
        print(f"expand / ({name} + interpreter): {ours.seconds / (run.seconds + start.seconds):.2f}")
    for folder in (out, copy):
        shutil.rmtree(folder)


def random_batches() -> list[Any]:
    """Packed batches of one document a row."""
    import torch

    from moesaic.data.packing import PackedBatch

    generator = torch.Generator().manual_seed(0)
    shape = (SEQUENCES, LENGTH)
    batches = []
    for _ in range(BATCHES):
        ids_BS = torch.randint(3, VOCABULARY, shape, generator=generator)
        labels_BS = ids_BS.clone()
        labels_BS[:, 0] = -100
        batches.append(
            PackedBatch(
                input_ids_BS=ids_BS,
                position_ids_BS=torch.arange(LENGTH).expand(shape).contiguous(),
                labels_BS=labels_BS,
                document_ids_BS=torch.arange(SEQUENCES).unsqueeze(1).expand(shape).contiguous(),
                domain_ids_BS=torch.zeros(shape, dtype=torch.int64),
                first_document=0,
                num_documents=SEQUENCES,
            )
        )
    return batches


def plain_passes(model: Any, batches: list[Any]) -> None:
    """Forward and backward, nothing else."""
    import torch
    import torch.nn.functional as F

    model.requires_grad_(False)
    matrices = [p for name, p in model.named_parameters() if ".experts." in name]
    for matrix in matrices:
        matrix.requires_grad_(True)
    for batch in batches:
        logits = model(batch.input_ids_BS, position_ids=batch.position_ids_BS, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.input_ids_BS[:, 1:].flatten()).backward()
    for matrix in matrices:
        matrix.grad = None
    assert torch.is_grad_enabled()


def gradients(moe: Path, repeats: int) -> None:
    """Both ways on one loaded model, interleaved."""
    import torch

    from moesaic.expansion.utility import measure
    from moesaic.loading import load

    model, batches = load(moe), random_batches()
    plain_passes(model, batches[:1])  # the first pass in a process is slower
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        measure(model, batches, name="model")
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        plain_passes(model, batches)
        plain.append(time.perf_counter() - start)
    print(f"{BATCHES * SEQUENCES * LENGTH} tokens, {torch.get_num_threads()} threads, best of {repeats}")
    print(f"gradients of experts {min(ours):.2f} s, plain passes {min(plain):.2f} s: {min(ours) / min(plain):.3f}")


def main() -> None:
    """Make the checkpoint if it is not there, and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prepare", "copying", "gradients"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moesaic-selection")
    arguments = parser.parse_args()
    work: Path = arguments.work
    moe, small = prepared(work, "large"), prepared(work, "small")
    if arguments.part == "copying":
        copying(moe, work, arguments.repeats)
    elif arguments.part == "gradients":
        gradients(small, arguments.repeats)


if __name__ == "__main__":
    main()
