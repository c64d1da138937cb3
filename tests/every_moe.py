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
from moesaic.data.packing import PackedBatch, keeps_documents_apart, one_per_row
from moesaic.families import support
from moesaic.families.derive import derive
from moesaic.families.moe import detect_moe
from moesaic.families.moe_table import MOE_FAMILIES, routed
from moesaic.families.shrink import EXPERT_KEYS, tiny_config
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import install, routing_context
from moesaic.routing.pools import RoutingContext
from moesaic.routing.restrict import restrict
from tests.tiny_training import VOCABULARY, save_tokenizer, tiny_recipe, write_documents

EXPERTS = 16
RATE = 0.1
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


def apart(case: Case) -> None:
    """Packed documents, as training hands them to the model, give the logits that each gives alone."""
    documents = [torch.randint(3, VOCABULARY, (length,)) for length in (5, 9, 2)]
    packed = pack([documents[:2], documents[2:]], 16)
    if not keeps_documents_apart(case.model):
        packed = one_per_row(packed)
    with torch.no_grad():
        together = case.model(packed.input_ids_BS, position_ids=packed.position_ids_BS, use_cache=False).logits
        for number, ids in enumerate(documents):
            alone = case.model(ids[None], use_cache=False).logits[0]
            assert (together[packed.document_ids_BS == number] - alone).norm() < 1e-5 * alone.norm()


def pack(rows: list[list[torch.Tensor]], width: int) -> PackedBatch:
    """Documents one after the other in rows of `width` tokens."""
    fills = {"input_ids": 0, "position_ids": 0, "document_ids": -1, "labels": -100, "domain_ids": -1}
    made = {name: torch.full((len(rows), width), fill) for name, fill in fills.items()}
    number = 0
    for row, documents in enumerate(rows):
        column = 0
        for ids in documents:
            place = (row, slice(column, column + len(ids)))
            made["input_ids"][place], made["position_ids"][place] = ids, torch.arange(len(ids))
            made["document_ids"][place] = number
            number, column = number + 1, column + len(ids)
        made["position_ids"][row, column:] = torch.arange(width - column)
    return PackedBatch(first_document=0, num_documents=number, **{f"{name}_BS": one for name, one in made.items()})


def train(case: Case) -> None:
    apart(case)
    shared = case.folder.parent / "recipe"
    ruled = routed(open_checkpoint(case.full).config) is not None
    recipe = tiny_recipe(
        shared,
        model=str(case.full),
        tokenizer=None,
        routing={"rule": "document_pool"} if ruled else {},
        losses={"bias_balancing": RATE} if ruled else {},
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
    if ruled:
        biases_moved(case, before, after)


def biases_moved(case: Case, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Loss-free balancing moved every selection bias by its rate, up or down, in the family's tensors or the record."""
    record = json.loads((case.folder / "trained" / "moesaic.json").read_text())["routing"]["selection_bias"]
    layers = detect_moe(open_checkpoint(case.full)).layers
    own = [one.name for layer in layers for one in layer.expert_tensors if one.role == "selection_bias"]
    assert bool(own) == (record is None)
    steps = torch.tensor(record) if record else torch.stack([(after[name] - before[name]).reshape(-1) for name in own])
    assert steps.shape == (len(layers), EXPERTS)
    assert steps.abs().max() > 0.9 * RATE
    assert torch.isclose(steps.abs(), torch.tensor(RATE), rtol=1e-3).logical_or(steps.abs() < 1e-6).all()


def rules(case: Case) -> None:
    before = case.logits()
    installed = install(case.model, RuleConfig(rule="topk"))
    assert torch.allclose(case.logits(), before, atol=1e-4)
    # A bias of training's own takes the place of the family's: the choice is made anew, here with the same numbers.
    installed = install(case.model, RuleConfig(rule="topk"), selection_bias=True)
    assert torch.allclose(case.logits(), before, atol=1e-4)
    assert installed.selection_bias is not None
    pools(case, installed.selection_bias)


def pools(case: Case, bias_LE: torch.Tensor) -> None:
    """Every token stays in the pool of its document, the experts that its tokens rate highest on average."""
    documents = torch.arange(4).repeat_interleave(8)
    context = RoutingContext(document_ids_T=documents, num_documents=4, document_keys_N=torch.arange(4))
    installed = install(case.model.train(), RuleConfig(rule="document_pool", pool_size=5), selection_bias=bias_LE)
    with torch.no_grad(), routing_context(installed, context) as record:
        case.model(TOKENS, use_cache=False)
    for router, decision, bias_E in zip(installed.routers, record.decisions, bias_LE, strict=True):
        own = router.__dict__["_moesaic_router"].settings.own
        logits_TE = decision.logits_TE
        if own is None:
            rated_TE = logits_TE.softmax(-1) + bias_E
        else:
            score = torch.sigmoid if own.decision.scoring == "sigmoid" else lambda values: values.softmax(-1)
            on_logits = own.decision.bias_on == "logits"
            rated_TE = score(logits_TE + bias_E) if on_logits else score(logits_TE) + bias_E
        for number in range(4):
            mine = documents == number
            best = set(rated_TE[mine].mean(0).topk(5).indices.tolist())
            assert set(decision.expert_ids_TK[mine].flatten().tolist()) <= best
            assert decision.allowed_TE is not None
            assert all(set(row.nonzero().flatten().tolist()) == best for row in decision.allowed_TE[mine])
    case.model.eval()
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
