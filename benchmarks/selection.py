"""`select`, `extract` and the subset against what they are made of, and against the usual way of scoring.

    python benchmarks/selection.py scoring|extraction|generation [--repeats 3] [--work DIR]

The checkpoints: random bf16 weights with the shapes of Qwen3-30B-A3B (hidden 2048, 128 experts of 768, top-8), two
layers, vocabulary 32,768, 2.7 GB, and for generation one of half the width and experts (1.0 GB); made once in the work
folder. Scoring needs 6 GB of memory.

- scoring: one pass that gives the statistics of all methods, against the same model's plain forward (without the output
  head) over the same tokens: streamed from disk like the pass, and loaded once before. And two ways of computing the
  scores on the loaded model, both with hooks, written from the papers' descriptions: REAP's (every expert on every
  token, the norms of the selected ones are used) and EASYEP's (a Python loop over the experts, each on its tokens,
  beside the model's own forward).
- extraction: a quarter and a half of the experts, against `cp` of the bytes written and the start of an interpreter
  with torch.
- generation: the full model, a quarter of it as a mask (`--selection`) and extracted: peak memory and tokens per second
  of greedy decoding, without loading.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measuring import MOESAIC, VOCABULARY, best, prepared, start_command, weight_bytes

SEQUENCES, LENGTH, BATCH = 16, 256, 8
NEW_TOKENS, PROMPTS, PROMPT_LENGTH = 32, 4, 64


def run_streamed(moe: Path, ids_NL: Any) -> None:
    """A plain forward, one layer's weights in memory."""
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.selection.stream import LoadedLayer, StreamedModel, make_batches

    batches = list(make_batches(ids_NL.tolist(), size=BATCH, padding_id=0))

    def step(layer: LoadedLayer) -> None:
        for batch in batches:
            batch.hidden_BSD = layer.run(batch)

    StreamedModel(open_checkpoint(moe)).layers(batches, step)


def run_pass(moe: Path, ids_NL: Any) -> None:
    """The same with the statistics of all methods: what `select` does."""
    from moesaic.checkpoint.source import open_checkpoint
    from moesaic.families.identity import describe
    from moesaic.families.moe import detect_moe
    from moesaic.selection.collect import collect_statistics

    checkpoint = open_checkpoint(moe)
    family = detect_moe(checkpoint)
    source = describe(checkpoint, family)
    collect_statistics(checkpoint, family, source, {"d": ids_NL.tolist()}, batch_size=BATCH)


def run_loaded(model: Any, ids_NL: Any, hook: Callable[..., None] | None = None) -> None:
    """A plain forward of a loaded model, with a hook on each MoE block or without."""
    import torch

    handles = [layer.mlp.register_forward_hook(hook) for layer in model.model.layers if hook is not None]
    with torch.inference_mode():
        for ids_BL in ids_NL.split(BATCH):
            model.model(ids_BL, use_cache=False)
    for handle in handles:
        handle.remove()


def scoring(moe: Path, repeats: int) -> None:
    """Time the ways of running and scoring, interleaved, the naive ones once."""
    import torch

    from moesaic.loading import load

    ids_NL = torch.randint(3, VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    model = load(moe)
    ways = {
        "plain forward, loaded": partial(run_loaded, model, ids_NL),
        "plain forward, streamed": partial(run_streamed, moe, ids_NL),
        "moesaic, all methods": partial(run_pass, moe, ids_NL),
    }
    naive = {
        "EASYEP's way": partial(run_loaded, model, ids_NL, every_expert_on_its_tokens),
        "REAP's way": partial(run_loaded, model, ids_NL, every_expert_on_every_token),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways | naive}
    run_loaded(model, ids_NL[:BATCH])  # the first pass in a process is slower
    for number in range(repeats):
        for name, way in (ways | (naive if not number else {})).items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    loaded, streamed = (min(seconds[name]) for name in ("plain forward, loaded", "plain forward, streamed"))
    print(f"{ids_NL.numel()} tokens, {torch.get_num_threads()} threads, best of {repeats} (naive ways: one run)")
    print(f"{'':26} {'seconds':>8} {'/ loaded':>9} {'/ streamed':>11}")
    for name, runs in seconds.items():
        print(f"{name:26} {min(runs):8.2f} {min(runs) / loaded:9.2f} {min(runs) / streamed:11.2f}")


def every_expert_on_every_token(block: Any, args: tuple[Any, ...], _output: Any) -> None:
    """All outputs of all experts, then the weighted norms of the selected ones."""
    import torch

    hidden_TD = args[0].flatten(0, 1)
    _, weights_TK, ids_TK = block.gate(hidden_TD)
    norms_ET = [one_expert(block, expert, hidden_TD).norm(dim=-1) for expert in range(block_size(block))]
    sums_E = torch.zeros(block_size(block), dtype=torch.float64)
    for expert, norms_T in enumerate(norms_ET):
        chosen_TK = ids_TK == expert
        chosen_T = chosen_TK.any(-1)
        sums_E[expert] = ((weights_TK * chosen_TK).sum(-1) * norms_T)[chosen_T].double().sum()


def every_expert_on_its_tokens(block: Any, args: tuple[Any, ...], output: Any) -> None:
    """A loop over the experts, each on the tokens that select it, with the drift of those tokens."""
    import torch

    hidden_TD, output_TD = args[0].flatten(0, 1), output.flatten(0, 1)
    _, weights_TK, ids_TK = block.gate(hidden_TD)
    drift_T = 1 - torch.nn.functional.cosine_similarity(hidden_TD, hidden_TD + output_TD, dim=-1)
    sums_E = torch.zeros(block_size(block), dtype=torch.float64)
    for expert in range(block_size(block)):
        tokens_R, places_R = torch.where(ids_TK == expert)
        norms_R = one_expert(block, expert, hidden_TD[tokens_R]).norm(dim=-1)
        sums_E[expert] = (weights_TK[tokens_R, places_R] * norms_R * drift_T[tokens_R].clamp_min(0)).double().sum()


def one_expert(block: Any, expert: int, hidden_RD: Any) -> Any:
    """One expert's output before weighting."""
    import torch.nn.functional as F

    gate_RI, up_RI = F.linear(hidden_RD, block.experts.gate_up_proj[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate_RI) * up_RI, block.experts.down_proj[expert])


def block_size(block: Any) -> int:
    """Number of experts."""
    return block.experts.gate_up_proj.shape[0]


def make_selection(moe: Path, work: Path, keep: str) -> Path:
    """Random experts: which ones does not matter to speed."""
    file = work / f"{keep.rstrip('%')}.json"
    best([MOESAIC, "select", str(moe), str(file), "--keep", keep, "--method", "random", "--quiet"], repeats=1)
    return file


def extraction(moe: Path, work: Path, repeats: int) -> None:
    """Extract, copy what was written, start an interpreter."""
    start = best(start_command(), repeats=repeats)
    print(f"best of {repeats}; interpreter and torch: {start.seconds:.2f} s")
    print(f"{'':12} {'GB':>6} {'extract s':>10} {'copy s':>7} {'/ (copy + start)':>17} {'peak GB':>8}")
    out, copy = work / "cut", work / "copy"
    for keep in ("25%", "50%"):
        command = [MOESAIC, "extract", str(moe), str(make_selection(moe, work, keep)), str(out), "--quiet"]
        ours = best(command, repeats=repeats, fresh=out)
        plain = best(["cp", "-r", str(out), str(copy)], repeats=repeats, fresh=copy)
        ratio = ours.seconds / (plain.seconds + start.seconds)
        print(
            f"keep {keep:7} {weight_bytes(out) / 1e9:6.2f} {ours.seconds:10.2f} {plain.seconds:7.2f} {ratio:17.2f} "
            f"{ours.peak_gb:8.2f}",
            flush=True,
        )
        for folder in (out, copy):
            shutil.rmtree(folder)


def generation(moe: Path, work: Path) -> None:
    """One process per kind of model."""
    selection, cut = make_selection(moe, work, "25%"), work / "cut"
    best([MOESAIC, "extract", str(moe), str(selection), str(cut), "--quiet"], repeats=1, fresh=cut)
    print(f"{PROMPTS} prompts of {PROMPT_LENGTH} tokens, {NEW_TOKENS} new tokens each")
    print(f"{'':20} {'weights GB':>11} {'peak GB':>8} {'tokens/s':>9}")
    kinds = {"full": (moe, ""), "25% as a mask": (moe, str(selection)), "25% extracted": (cut, "")}
    for name, (folder, mask) in kinds.items():
        run = best([sys.executable, __file__, "generate", "--work", str(folder), "--selection", mask], repeats=1)
        rate = json.loads(run.output)["tokens_per_second"]
        print(f"{name:20} {weight_bytes(folder) / 1e9:11.2f} {run.peak_gb:8.2f} {rate:9.1f}", flush=True)
    shutil.rmtree(cut)


def generate(folder: Path, selection: str) -> None:
    """Greedy decoding; the fastest of three runs, as JSON."""
    import torch

    from moesaic.loading import load
    from moesaic.routing.restrict import restrict
    from moesaic.routing.subset import load_selection

    model: Any = load(folder)
    restrict(model, load_selection(selection) if selection else None)
    ids_BL = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        model.generate(ids_BL, **options)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"tokens_per_second": PROMPTS * NEW_TOKENS / min(seconds)}))


def main() -> None:
    """Make the checkpoint if it is not there, and run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prepare", "scoring", "extraction", "generation", "generate"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "moesaic-selection")
    parser.add_argument("--selection", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work: Path = arguments.work
    if arguments.part == "generate":
        generate(work, arguments.selection)
        return
    moe, small = prepared(work, "large"), prepared(work, "small")
    if arguments.part == "scoring":
        scoring(moe, arguments.repeats)
    elif arguments.part == "extraction":
        extraction(moe, work, arguments.repeats)
    elif arguments.part == "generation":
        generation(small, work)


if __name__ == "__main__":
    main()
