"""`moesaic report` on an inspection of a million tokens: time, memory and size, and how fast Chromium opens it.

    python benchmarks/report.py [--repeats 3] [--layers 32] [--experts 64] [--top-k 8] [--models 2] [--work DIR]

The inspection is made up (tests/large_inspection.py): 10,000 documents of 100 tokens in 24 domains, 32 clusters,
26,000 tokens to read. Each report is written in a fresh process. Opening is the wall time from the address to the first
view, and from the click on a view to its last chart, in a browser that runs already.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from pathlib import Path

from measuring import MOESAIC, best

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from moesaic.analysis.format import write_inspection
from tests.browser.chromium import find_chromium
from tests.large_inspection import large_inspection

_VIEWS = ("load", "similarity", "clusters", "reader", "experts", "position")


def make(folder: Path, *, layers: int, experts: int, top_k: int, models: int) -> None:
    """Write the inspection, with as many models as asked for (1 or 2)."""
    folder.mkdir(parents=True)
    made = large_inspection(layers=layers, experts=experts, top_k=top_k)
    other = (
        large_inspection(name="./other", layers=layers, experts=experts, top_k=top_k, seed=1) if models > 1 else None
    )
    write_inspection(dataclasses.replace(made, against=other), folder)


def open_times(file: Path, chromium: str, repeats: int) -> dict[str, float]:
    """Seconds until the first view, and until each other view is drawn: the best of some tries."""
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(repeats):
            page = browser.new_page(viewport={"width": 1300, "height": 900})
            start = time.perf_counter()
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            times.setdefault("open", []).append(time.perf_counter() - start)
            for view in _VIEWS:
                start = time.perf_counter()
                page.click(f"#tab-{view}")
                page.wait_for_function(
                    """() => [...document.querySelectorAll('#main .plot')].every((e) => e.classList.contains('drawn'))
                      && [...document.querySelectorAll('.cluster-detail, .expert, .reader')].every((e) => e.children[0])
                    """
                )
                times.setdefault(view, []).append(time.perf_counter() - start)
            page.close()
        browser.close()
    return {name: min(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--models", type=int, choices=(1, 2), default=2)
    parser.add_argument("--work", type=Path, help="Folder that keeps the inspection [default: a temporary one].")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        inspected, out = work / "inspected", work / "report.html"
        if not inspected.exists():
            make(
                inspected,
                layers=options.layers,
                experts=options.experts,
                top_k=options.top_k,
                models=options.models,
            )
        run = best([MOESAIC, "report", str(inspected), str(out), "--overwrite"], repeats=options.repeats)
        print(run.output.strip())
        print(f"written in {run.seconds:.2f} s, {run.peak_gb:.2f} GB")
        if (chromium := find_chromium()) is None:
            print("no Chromium: opening not measured")
            return
        for name, seconds in open_times(out, chromium, options.repeats).items():
            print(f"{name}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
