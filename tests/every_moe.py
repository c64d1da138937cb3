"""Every causal MoE family of transformers as a tiny random checkpoint, and what each verb does with it.

`python -m tests.every_moe [FAMILY ...]` writes what it finds to src/moesaic/families/tested.json and docs/families.md.
"""

import functools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families import support
from moesaic.families.derive import derive
from moesaic.families.moe import detect_moe
from moesaic.families.moe_table import MOE_FAMILIES
from moesaic.families.shrink import EXPERT_KEYS, tiny_config
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install
from moesaic.routing.restrict import restrict
from tests.tiny_training import VOCABULARY, save_tokenizer, tiny_recipe, write_documents

EXPERTS = 16
TOKENS = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(5))


def families() -> list[str]:
    """The model types whose causal class has experts of transformers' experts interface."""
    root, found, classes = Path(transformers.__file__).parent / "models", [], set()
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        folder = root / model_type_to_module_name(model_type)
        sources = "".join(file.read_text(encoding="utf-8") for file in folder.glob("modeling_*.py"))
        parts: Any = CONFIG_MAPPING[model_type].sub_configs
        composite = "text_config" in parts
        if "@use_experts_implementation" in sources and not composite and name not in classes:
            classes.add(name)
            found.append(model_type)
    return found


def save(folder: Path, family: str) -> Path:
    """A checkpoint with every number drawn at random, as the family's are stored on the hub, and a tokenizer."""
    plain = tiny_config(family)
    sizes = {**dict.fromkeys(EXPERT_KEYS, EXPERTS), "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY}
    config = tiny_config(family, **{key: size for key, size in sizes.items() if key in plain.to_dict()})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    stream = torch.Generator().manual_seed(0)
    with torch.no_grad():
        biases = [tensor for tensor in model.buffers() if EXPERTS in tensor.shape and tensor.is_floating_point()]
        for tensor in [*model.parameters(), *biases]:
            tensor.copy_(torch.randn(tensor.shape, generator=stream) * 0.2)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    if "num_hidden_layers" not in written:  # Nemotron-H's published ones have it, beside the list of its layers
        (folder / "config.json").write_text(json.dumps(written | {"num_hidden_layers": len(model.base_model.layers)}))
    return save_tokenizer(folder)


class Case:
    """One family's checkpoint, and what was made of it."""

    def __init__(self, family: str, folder: Path, data: Path) -> None:
        self.family, self.folder, self.data = family, folder, data
        self.full = save(folder / "full", family)

    @functools.cached_property
    def model(self) -> Any:
        return moesaic.load(self.full)

    @functools.cached_property
    def random(self) -> Any:
        return moesaic.select(self.full, keep="50%", method="random")

    @functools.cached_property
    def selection(self) -> Any:
        return moesaic.select(self.full, keep="50%", data=str(self.data), method="frequency", max_tokens=24)

    @functools.cached_property
    def half(self) -> Path:
        moesaic.extract(self.full, self.random, self.folder / "half")
        return self.folder / "half"

    @functools.cached_property
    def half_logits(self) -> torch.Tensor:
        return self.logits(self.half)

    def logits(self, folder: Path | None = None) -> torch.Tensor:
        model = self.model if folder is None else moesaic.load(folder)
        with torch.no_grad():
            return model(TOKENS, use_cache=False).logits


def same(first: Path, second: Path) -> bool:
    one, other = (load_file(folder / "model.safetensors") for folder in (first, second))
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def read(case: Case) -> None:
    found = detect_moe(open_checkpoint(case.full))
    assert (found.num_experts, found.layers != ()) == (EXPERTS, True)
    assert case.logits().isfinite().all()


def inspect(case: Case) -> None:
    found = moesaic.inspect(
        case.full, case.folder / "inspected", data=case.data, tokens=100, min_length=8, clusters=2, batch_size=4
    )
    assert found.statistics.counts_SLE[0].sum() == found.data.tokens * len(found.model.layers) * found.model.top_k


def select(case: Case) -> None:
    model = detect_moe(open_checkpoint(case.full))
    assert case.selection.counts == (EXPERTS // 2,) * len(model.layers)
    assert case.selection.layers == tuple(layer.layer for layer in model.layers)
    assert case.random.counts == case.selection.counts


def extract(case: Case) -> None:
    everything = moesaic.select(case.full, keep="100%", method="random")
    moesaic.extract(case.full, everything, case.folder / "all")
    assert same(case.full, case.folder / "all")
    assert detect_moe(open_checkpoint(case.half)).num_experts == EXPERTS // 2
    assert case.half_logits.isfinite().all()


def merge_back(case: Case) -> None:
    moesaic.merge_back(case.full, case.half, case.folder / "merged", parts=("router", "shared", "other"))
    assert same(case.full, case.folder / "merged")


def restricted(case: Case) -> None:
    with restrict(case.model, case.random):
        logits = case.logits()
    assert torch.allclose(logits, case.half_logits, atol=1e-4)


def expand(case: Case) -> None:
    top_k = detect_moe(open_checkpoint(case.full)).top_k
    out = case.folder / "large"
    result = moesaic.expand(case.full, out, experts=2 * EXPERTS, top_k=2 * top_k, delta=0)
    logits, before = case.logits(out), case.logits()
    assert result.statement.code == ("E1" if result.plan.model.family.adds_up else "none")
    error = ((logits - before).norm() / before.norm()).item()
    assert (error < 1e-4) == (result.statement.code == "E1"), error


def verify(case: Case) -> None:
    if not (case.folder / "large").exists():
        expand(case)
    assert moesaic.verify(case.full, case.folder / "large", text=str(case.data), quiet=True).ok


def train(case: Case) -> None:
    shared = case.folder.parent / "recipe"
    recipe = tiny_recipe(
        shared,
        model=str(case.full),
        tokenizer=None,
        losses={},
        optimizer={"lr": 1e-2, "warmup_steps": 0},
        budget={"steps": 1},
        batch={"tokens": 64, "micro_sequences": 2},
    )
    moesaic.train(recipe, case.folder / "trained", quiet=True)
    before, after = (load_file(one / "model.safetensors") for one in (case.full, case.folder / "trained"))
    layers = detect_moe(open_checkpoint(case.full)).layers
    names = [name for layer in layers for one in layer.expert_tensors for name in one.names(EXPERTS)]
    moved = [name for name in names if not torch.equal(before[name], after[name])]
    assert moved


def rules(case: Case) -> None:
    before = case.logits()
    installed = install(case.model, RuleConfig(rule="topk"))
    assert installed.routers
    assert torch.allclose(case.logits(), before, atol=1e-4)
    installed.uninstall()


ACTIONS: dict[str, Callable[[Case], None]] = {
    "read": read,
    "inspect": inspect,
    "select": select,
    "extract": extract,
    "merge-back": merge_back,
    "restrict": restricted,
    "expand": expand,
    "verify": verify,
    "train": train,
    "rules": rules,
}


def outcome(action: Callable[[Case], None], case: Case) -> str:
    """ "tested", or the reason of the refusal."""
    try:
        action(case)
    except MoesaicError as error:
        reason = str(error).replace(f"{case.full}: ", "").replace(f"model_type {case.family!r}: ", "")
        return f"no: {reason.split('; ')[0]}"
    return "tested"


def cells(case: Case) -> dict[str, str]:
    """What every verb does with a family."""
    return {verb: outcome(action, case) for verb, action in ACTIONS.items()}


def facts(family: str, found: dict[str, str]) -> dict[str, Any]:
    """A line of tested.json."""
    try:
        row = MOE_FAMILIES.get(family) or derive(family)
        return {"about": row.about, "notes": row.notes, "cells": found}
    except MoesaicError as error:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
        return {"about": str(name).removesuffix("ForCausalLM"), "notes": str(error), "cells": found}


def main(chosen: Sequence[str]) -> None:
    """Try some families, or all, and write down what was found, in tested.json and docs/families.md."""
    root = Path(__file__).parents[1]
    file, found = root / "src/moesaic/families/tested.json", {}
    with tempfile.TemporaryDirectory() as scratch:
        data = write_documents(Path(scratch) / "t.jsonl", "math", number=6, seed=0)
        for family in chosen or families():
            found[family] = facts(family, cells(Case(family, Path(scratch) / family, data)))
            print(family, {verb: cell for verb, cell in found[family]["cells"].items() if cell != "tested"}, flush=True)
    known = json.loads(file.read_text(encoding="utf-8")) | found
    everything = {family: known[family] for family in families() if family in known}
    file.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    support.tested.cache_clear()
    page = root / "docs/families.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("| model_type |")
    after = rest[rest.index("\n\n**read**") :]
    page.write_text(before + support.markdown(support.support()) + after, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
