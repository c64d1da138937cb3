"""DivMoE's published initialisation (random router, equation 5's scale) on a real model, over many seeds.

    python benchmarks/statements.py BASE [--seeds 20] [--tokens 250]

Each seed is one `moesaic upcycle` with the base as all four specialists (N = 4, M = K = 2) and one `moesaic verify`.
The table gives, as means over layers, the share of tokens whose two experts cover both shards and the norm of the FFN's
output against the dense one. With a random router the first is 50% (M!/M^M); the linear limit of the second is 4.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import moesaic
from moesaic.probe import default_text
from moesaic.verifying.recipe import VerifyReport

DOMAINS = ("math", "code", "science", "commonsense")


def main() -> None:
    """Convert and verify once per seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="dense checkpoint")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=250, help="about this many tokens of Python's docstrings")
    arguments = parser.parse_args()
    coverage, norms = [], []
    with tempfile.TemporaryDirectory() as work:
        text, out = Path(work) / "text.txt", Path(work) / "moe"
        text.write_text(default_text()[: 4 * arguments.tokens], encoding="utf-8")
        print(f"{'seed':>4} {'coverage':>9} {'norm ratio':>11}  statement", flush=True)
        for seed in range(arguments.seeds):
            moesaic.upcycle(
                arguments.base, out, method="divmoe", specialists=dict.fromkeys(DOMAINS, arguments.base), shards=2,
                top_k=2, router_init="random", scale="paper", seed=seed, overwrite=True,
            )  # fmt: skip
            report = moesaic.verify(arguments.base, out, text=text, quiet=True)
            assert isinstance(report, VerifyReport)
            coverage.append(report.coverage or 0.0)
            norms.append(report.norm_ratio)
            print(f"{seed:4} {coverage[-1]:9.2%} {norms[-1]:11.3f}  {report.code}: {report.statement}", flush=True)
    print(f"mean {statistics.fmean(coverage):9.2%} {statistics.fmean(norms):11.3f}")
    print(f"min  {min(coverage):9.2%} {min(norms):11.3f}")
    print(f"max  {max(coverage):9.2%} {max(norms):11.3f}")


if __name__ == "__main__":
    main()
