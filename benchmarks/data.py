"""Tokenising and packing: MB/s beside the plain `tokenizers` batch encode (the limit), and memory as the corpus grows.

    python benchmarks/data.py --tokenizer FOLDER --corpus FILE.jsonl [--rounds 5]

Both sides tokenise the same texts in the same batches with the same number of threads (`RAYON_NUM_THREADS`). The
plain side has the texts in memory already and throws the result away; ours reads and checks the JSON lines, hashes
the file twice and writes the cache to the disk. They take turns, and the fastest round of each counts. Prints one
JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from moesaic.data.dataset import PackedDataset
from moesaic.data.tokenise import prepare
from moesaic.data.recipe import DataRecipe, SourceRecipe
tokenizer, corpus, cache = sys.argv[1:]
recipe = DataRecipe(sequence_length=1024, sources=(SourceRecipe(path=corpus, domain="d"),))
tok = AutoTokenizer.from_pretrained(tokenizer)
peak = lambda: int(next(l for l in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in l).split()[1])
before = peak()
dataset = PackedDataset(prepare(recipe, tok, cache_dir=cache, quiet=True), seed=0, sequences_per_step=32)
made = peak()
for step in range(30):
    dataset.batch(step)
print(before, made, peak())
"""


def tokenising(tokenizer_path: str, corpus: Path, rounds: int, work: Path) -> dict[str, float]:
    from transformers import AutoTokenizer

    from moesaic.data import tokenise as module
    from moesaic.data.recipe import SourceRecipe
    from moesaic.data.tokenise import Encoder

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    encoder = Encoder(tokenizer)
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    batches, size = [[]], 0
    for text in texts:
        batches[-1].append(text)
        size += len(text)
        if size >= module.BATCH_CHARACTERS:
            batches.append([])
            size = 0
    plain, ours = [], []
    cache = module.tokenise(SourceRecipe(path=str(corpus), domain="d"), encoder, work / "warm", quiet=True)
    for _ in range(rounds):
        start = time.perf_counter()
        for batch in batches:
            tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=True)
        plain.append(time.perf_counter() - start)
        shutil.rmtree(work / "cache", ignore_errors=True)
        start = time.perf_counter()
        module.tokenise(SourceRecipe(path=str(corpus), domain="d"), encoder, work / "cache", quiet=True)
        ours.append(time.perf_counter() - start)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "text_MB": round(megabytes, 2),
        "tokens": cache.num_tokens,
        "plain_MB_per_s": round(megabytes / min(plain), 3),
        "ours_MB_per_s": round(megabytes / min(ours), 3),
        "ours_over_plain": round(min(plain) / min(ours), 3),
    }


def packing(tokenizer_path: str, corpus: Path, work: Path) -> dict[str, float]:
    from transformers import AutoTokenizer

    from moesaic.data.dataset import PackedDataset
    from moesaic.data.recipe import DataRecipe, SourceRecipe
    from moesaic.data.tokenise import prepare

    recipe = DataRecipe(sequence_length=4096, sources=(SourceRecipe(path=str(corpus), domain="d"),))
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    start = time.perf_counter()
    data = prepare(recipe, tokenizer, cache_dir=work / "cache", quiet=True)
    reopened = time.perf_counter() - start
    dataset = PackedDataset(data, seed=0, sequences_per_step=64)
    times, documents = [], 0
    for step in range(30):
        start = time.perf_counter()
        documents += dataset.batch(step * 10**9).num_documents  # far apart: nothing to reuse
        times.append(time.perf_counter() - start)
    return {
        "reopen_s": round(reopened, 3),
        "batch_tokens": dataset.tokens_per_step,
        "documents_per_batch": round(documents / 30),
        "batch_ms_median": round(1e3 * sorted(times)[15], 2),
        "packing_Mtokens_per_s": round(dataset.tokens_per_step / sorted(times)[15] / 1e6, 2),
    }


def memory(tokenizer_path: str, corpus: Path, work: Path) -> dict[str, dict[str, int]]:
    found = {}
    for copies in (1, 4):
        file = work / f"{copies}.jsonl"
        with file.open("wb") as out:
            for _ in range(copies):
                out.write(corpus.read_bytes())
        arguments = [sys.executable, "-c", CHILD, tokenizer_path, str(file), str(work / f"cache-{copies}")]
        lines = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.split()
        names = ("loaded_MB", "tokenised_MB", "packed_MB")
        found[f"{copies}x"] = {name: int(value) // 1024 for name, value in zip(names, lines, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--corpus", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        result = {
            "corpus": arguments.corpus.name,
            "cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "tokenising": tokenising(arguments.tokenizer, arguments.corpus, arguments.rounds, work),
            "packing": packing(arguments.tokenizer, arguments.corpus, work),
            "peak_memory": memory(arguments.tokenizer, arguments.corpus, work),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
