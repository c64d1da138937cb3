"""What starting costs: `moesaic generate` of one token beside the shortest program with transformers that does it.

    python benchmarks/startup.py CHECKPOINT [--repeats 7]

CHECKPOINT is one that `moesaic upcycle` wrote. Both are processes of their own and take turns; minimum and median of
their processor time (user and system, which other programs change less than the clock) and of the wall time. Then the
modules that only our program imports, heaviest first, with their own share of the time (`python -X importtime`).
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter

from measuring import MOESAIC

PEER = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({0!r}, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained({0!r}, trust_remote_code=True)
print(tokenizer.decode(model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=1)[0]))
"""
OURS = "import sys; sys.argv = ['moesaic', 'generate', {0!r}, 'Hello', '--max-new-tokens', '1']\n" + (
    "from moesaic.__main__ import main; main()"
)
_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def run(command: list[str]) -> tuple[float, float]:
    """Processor and wall seconds of a process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def imports(code: str) -> dict[str, int]:
    """Microseconds that each module took by itself."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=False)
    return {found[2]: int(found[1]) for line in done.stderr.splitlines() if (found := _LINE.match(line))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    commands = {
        "moesaic generate": [MOESAIC, "generate", options.checkpoint, "Hello", "--max-new-tokens", "1"],
        "transformers": [sys.executable, "-c", PEER.format(options.checkpoint)],
        "import AutoModelForCausalLM": [sys.executable, "-c", "from transformers import AutoModelForCausalLM"],
        "import torch": [sys.executable, "-c", "import torch"],
        "moesaic --help": [MOESAIC, "--help"],
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(options.repeats):
        for name, command in commands.items():
            seconds[name].append(run(command))
    print("| program | processor s: least, median | wall s: least, median |\n|---|---|---|")
    for name, runs in seconds.items():
        cells = [f"{min(values):.2f}, {statistics.median(values):.2f}" for values in zip(*runs, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")
    ours, peer = imports(OURS.format(options.checkpoint)), imports(PEER.format(options.checkpoint))
    own: Counter[str] = Counter()
    for module, microseconds in ours.items():
        if module not in peer:
            own[".".join(module.split(".")[:2]) if module.startswith("moesaic") else module.split(".")[0]] += (
                microseconds
            )
    print(f"\nimported by ours alone: {sum(own.values()) / 1e3:.0f} ms")
    for module, microseconds in own.most_common(12):
        print(f"{microseconds / 1e3:8.1f} ms  {module}")


if __name__ == "__main__":
    main()
