"""The golden commands: small runs of every verb, method, family and layout, and a hash of every file they leave.

    python -m tests.golden.commands FOLDER [computed]   # run here; prints {command: {file: hash}} as JSON
    python -m tests.golden.record                       # write hashes.json: after a wanted change, named in the commit
    python -m tests.golden.compare COMMIT               # run all with COMMIT's code and with this one's, and compare

`MOVED` are verbs that move bytes: the same files on every machine, so `hashes.json` has them. `COMPUTED` are verbs
whose last bits depend on the processor: old and new code are compared on one machine. Times, versions and the copy of
modeling_moesaic.py (it is the package's own file) are left out; paths are relative to the folder of the run.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.tiny_models import save_tiny, save_tiny_gemma3_wrapper
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe
from tests.tiny_training import save_tokenizer, tiny_recipe, write_documents

SOURCES = "sources"
_MASKED = {"seconds", "versions", "transformers_version", "tokens_per_second", "time", "created", "minutes", "memory"}
_TIMES = re.compile(r"\b\d[\d,.]* ?(s|ms|seconds|min|minutes|h|tokens/s|MB/s)\b")
_UNHASHED = {"modeling_moesaic.py"}
_STACKED_ONLY = ("gpt_oss",)
_WITHOUT_PER_EXPERT = ("granitemoe", "granitemoeshared")
_GROUPED: dict[str, dict[str, Any]] = {"deepseek_v3": {"n_routed_experts": 16}, "glm4_moe": {"n_routed_experts": 16}}
"""Families that choose groups of experts first: each group keeps at least two."""
_SPECIALISTS = "--specialist math=math --specialist code=code"


def _moved() -> dict[str, str]:
    """Name -> command line (its second to last or last path is the output, named as the command)."""
    lines = {
        "scratch": "upcycle base OUT --method scratch --experts 4",
        "sparse": "upcycle base OUT --method sparse --experts 4 --top-k 2 --shared-experts 1",
        "sparse-all": "upcycle base OUT --method sparse --experts 4 --top-k 2 --weighting all",
        "drop": "upcycle base OUT --method drop --experts 4",
        "drop-fine": "upcycle base OUT --method drop --experts 8 --shards 2 --drop-indices per-matrix",
        "virtual": "upcycle base OUT --method virtual_group --experts 8 --shards 2 --shared-experts 2",
        "virtual-4": "upcycle base OUT --method virtual_group --experts 8 --shards 4 --top-k 4 --weighting all",
        "virtual-paper": "upcycle base OUT --method virtual_group --experts 4 --shards 2 --scale paper --seed 3",
        "btx": f"upcycle base OUT --method btx {_SPECIALISTS} --dtype bfloat16",
        "divmoe": f"upcycle base OUT --method divmoe {_SPECIALISTS} --shard-size 40KB",
        "divmoe-random": f"upcycle base OUT --method divmoe {_SPECIALISTS} --router-init random --shards 3 --top-k 2",
        "divmoe-layer": f"upcycle base OUT --method divmoe {_SPECIALISTS} --layers 1 "
        "--shared-weights random-specialist",
        "divmoe-base": f"upcycle base OUT --method divmoe {_SPECIALISTS} --shared-weights base --routing topk",
        "reinit": "upcycle base OUT --method scratch --experts 4 --shared-weights reinit",
        "with-biases": "upcycle biases OUT --method virtual_group --experts 4 --shards 2 --shared-experts 1",
        "fused": "upcycle phi3 OUT --method drop --experts 4 --shards 2",
        "from-wrapper": "upcycle wrapper OUT --method virtual_group --experts 4 --shards 2",
        "half": "upcycle qwen3 OUT --method virtual_group --experts 4 --shards 2 --dtype float16",
        "gemma": "upcycle gemma2 OUT --method sparse --experts 4",
        "grown": "expand virtual OUT --experts 12 --seed 1",
        "grown-exact": "expand drop OUT --experts 7 --routing one_per_copy_group",
        "grown-random": "expand drop OUT --experts 6 --expert-op random --router-op copy_noise",
        "grown-uneven": "expand drop OUT --experts 6 --allocation sample --delta 0",
        "choice": "select virtual OUT --keep 4 --method random --seed 2",
        "part": "extract virtual choice OUT",
        "back": "merge-back virtual part OUT --with router,shared,other",
        "back-mean": "merge-back virtual part OUT --average 0.25",
        "native-qwen3": "export half OUT --to qwen3_moe",
        "native-mixtral": "export sparse-plain OUT --to mixtral",
        "native-fused": "export sparse-plain OUT --to mixtral --layout fused --dtype bfloat16",
        "native-granite": "export sparse OUT --to granitemoeshared",
        "native-qwen2": "export sparse-all OUT --to qwen2_moe",
        "plan": "plan divmoe",
        "plan-dense": "plan base",
        "plan-recipe": "plan train.yaml",
        "families": "families",
        "recipes": "recipes list",
    }
    lines = {"sparse-plain": "upcycle base OUT --method sparse --experts 4 --top-k 2"} | lines
    for family in MOE_FAMILIES:
        grown, keep = (24, 8) if family in _GROUPED else (12, 4)
        lines[f"{family}-grown"] = f"expand {family} OUT --experts {grown}"
        lines[f"{family}-plan"] = f"plan {family}"
        for source in (family, f"{family}-fused"):
            if source.removesuffix("-fused") in _STACKED_ONLY and source != family:
                continue
            lines[f"{source}-choice"] = f"select {source} OUT --keep {keep} --method random"
            lines[f"{source}-part"] = f"extract {source} {source}-choice OUT"
            lines[f"{source}-back"] = f"merge-back {source} {source}-part OUT --with router"
            lines[f"{source}-mean"] = f"merge-back {source} {source}-part OUT --average 0.5"
        lines[f"{family}-to-fused"] = f"export {family} OUT --layout fused --dtype float16"
        if family not in (*_STACKED_ONLY, *_WITHOUT_PER_EXPERT):
            lines[f"{family}-per-expert"] = f"export {family}-fused OUT --layout per-expert"
    return lines


def _computed() -> dict[str, str]:
    data = "--data math.jsonl --data code.jsonl"
    return {
        "trained": "train train.yaml OUT",
        "trained-dense": "train dense.yaml OUT",
        "trained-pools": "train pools.yaml OUT",
        "trained-groups": "train groups.yaml OUT",
        "trained-grown": "train grown.yaml OUT",
        "utility": "expand trained OUT --experts 12 --calibration math.jsonl --utility-batches 2 --sequence-length 16",
        "saliency": "expand trained OUT --experts 12 --utility saliency --allocation proportional "
        "--calibration math.jsonl --utility-batches 2 --sequence-length 16",
        "operators": "expand drop OUT --experts 8 --expert-op svd_perturb --router-op orthogonal --utility weight_norm",
        **{
            f"by-{method}": f"select trained OUT --keep 50% --data math.jsonl --method {method}"
            for method in ("router", "easy_ep", "reap", "frequency")
        },
        "inspected": f"inspect trained OUT {data} --clusters 4 --min-length 8",
        "evaluated": "eval trained --suite arc_easy,gsm8k --data-dir evals --limit 3 --out OUT",
        "held-out": "eval trained --suite perplexity --data-dir corpus --domain-field= --out OUT",
        "verified": "verify base virtual",
        "verified-groups": "verify base divmoe",
        "verified-grown": "verify drop grown-exact",
        "compared": "compare trained trained-pools --baseline trained",
        "reported": "report inspected evaluated OUT",
        "generated": "generate trained abc --max-new-tokens 5",
    }


MOVED, COMPUTED = _moved(), _computed()
_SUFFIXES = {"choice": "", "reported": ".html", "evaluated": ".json", "held-out": ".json"}


def write_sources(folder: Path) -> None:
    """Dense models, mixtures of experts, text and recipes; everything in `folder`."""
    import torch

    from tests.tiny_evals import write_evals

    torch.manual_seed(0)  # what the tiny models don't draw themselves
    save_tokenizer(save_tiny(folder / "base", "llama"))
    for seed, name in enumerate(("math", "code"), start=1):
        save_tokenizer(save_tiny(folder / name, "llama", seed=seed))
    save_tiny(folder / "biases", "llama", mlp_bias=True, max_shard_size="20KB")
    save_tiny(folder / "phi3", "phi3", tied=True)
    save_tiny(folder / "qwen3", "qwen3")
    save_tiny(folder / "gemma2", "gemma2", tied=True)
    save_tiny_gemma3_wrapper(folder / "wrapper")
    for family in MOE_FAMILIES:
        config = _GROUPED.get(family, {})
        save_tokenizer(save_tiny_moe(folder / family, family, **config))
        if family not in _STACKED_ONLY:
            save_tiny_moe(folder / f"{family}-fused", family, fused=True, **config)
    for domain in ("math", "code"):
        write_documents(folder / f"{domain}.jsonl", domain, number=30, seed=0)
        (folder / "corpus").mkdir(exist_ok=True)
        write_documents(folder / "corpus" / f"{domain}.valid.jsonl", domain, number=6, seed=1)
    write_evals(folder / "evals")
    recipe = tiny_recipe(folder / "data")
    for path in [*recipe["data"]["sources"], *recipe["data"]["validation"]]:
        path["path"] = str(Path(path["path"]).relative_to(folder))
    recipe["tokenizer"] = "data/tokenizer"
    pools = {"rule": "document_pool", "pool_size": [2, 8]}
    changes: dict[str, dict[str, Any]] = {
        "train": {},
        "dense": {"model": "base", "tokenizer": None, "losses": {}},
        "pools": {"routing": pools},
        "groups": {"model": "divmoe", "tokenizer": None},
        "grown": {"model": "drop", "tokenizer": None, "expand": {"step": 4, "experts": 6}},
    }
    for name, change in changes.items():
        (folder / f"{name}.yaml").write_text(json.dumps(recipe | change))


def run_all(folder: Path, lines: dict[str, str]) -> dict[str, dict[str, str]]:
    """Run command lines in `folder`: the hashes of what each of them wrote and printed."""
    from moesaic.cli.app import run

    folder = folder.resolve()
    os.chdir(folder)
    os.environ["MOESAIC_CACHE"] = str(folder / ".cache")
    found: dict[str, dict[str, str]] = {}
    for name, line in lines.items():
        out = f"{name}{_SUFFIXES.get(name, '')}"
        words = [out if word == "OUT" else _renamed(word) for word in line.split()]
        printed, said = io.StringIO(), io.StringIO()
        quiet = [] if words[0] in ("families", "compare", "recipes") else ["--quiet"]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
            status = run([*words, "--json", *quiet])
        if status:
            raise RuntimeError(f"moesaic {' '.join(words)}: status {status}: {said.getvalue()}{printed.getvalue()}")
        hashes = {"--json": _hash(_masked_json(printed.getvalue()))}
        path = folder / out
        files = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
        for file in files:
            if file.is_file() and file.name not in _UNHASHED and "state" not in file.relative_to(folder).parts:
                hashes[str(file.relative_to(folder))] = _hash(_content(file))
        found[name] = hashes
    return found


def _renamed(word: str) -> str:
    return f"{word}{_SUFFIXES.get(word, '')}"


def _content(file: Path) -> bytes:
    if file.suffix == ".json":
        return _masked_json(file.read_text(encoding="utf-8"))
    if file.suffix == ".jsonl":
        return b"\n".join(_masked_json(line) for line in file.read_text(encoding="utf-8").splitlines())
    if file.name.startswith("events.out."):  # TensorBoard's own times and host name
        return b""
    if file.suffix in (".html", ".md"):
        return _TIMES.sub("", file.read_text(encoding="utf-8")).encode()
    return file.read_bytes()


def _masked_json(text: str) -> bytes:
    return json.dumps(_mask(json.loads(text)), sort_keys=True).encode()


def _mask(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: None if _is_masked(key) else _mask(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mask(item) for item in value]
    return _TIMES.sub("", value) if isinstance(value, str) else value


def _is_masked(key: str) -> bool:
    return key in _MASKED or key.endswith(("_seconds", "_per_second", "_memory"))


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def source_hash(folder: Path) -> str:
    """One hash of all sources' weights: tells whether this machine draws the numbers that hashes.json was made from."""
    files = sorted(folder.rglob("*.safetensors"))
    return _hash(b"".join(str(file.relative_to(folder)).encode() + file.read_bytes() for file in files))


def main() -> None:
    """Run the list(s) in a new folder and print the hashes."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_sources(folder)
    hashes = {SOURCES: {"": source_hash(folder)}}
    lines = MOVED | COMPUTED if "computed" in sys.argv[2:] else MOVED
    print(json.dumps(hashes | run_all(folder, lines), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
