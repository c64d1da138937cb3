"""Heads for classification and question answering, and plans for tensor and expert parallelism, of every base."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from moesaic.modeling.names import AUTO_CLASSES, class_names
from tests.tiny_models import BASES, randomize, tiny_moe_config, tiny_moe_model
from tests.tiny_moes import tiny_moe

IDS = torch.randint(3, 96, (1, 20), generator=torch.Generator().manual_seed(0))
HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sequence": (AutoModelForSequenceClassification, {"labels": torch.tensor([2])}),
    "tokens": (AutoModelForTokenClassification, {"labels": torch.full((1, 20), 1)}),
    "answers": (
        AutoModelForQuestionAnswering,
        {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([4])},
    ),
}


def outputs_of(model: Any, labels: dict[str, Any]) -> list[Tensor]:
    output = model.eval()(IDS, **labels)
    return [output.loss, *(output[key] for key in ("logits", "start_logits", "end_logits") if key in output)]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("base", BASES)
def test_head_trains_and_comes_back(tmp_path: Path, base: str, head: str) -> None:
    auto, labels = HEADS[head]
    config = tiny_moe_config(base, num_labels=3, pad_token_id=0)
    model = auto.from_config(config)
    randomize(model, 0)
    found = outputs_of(model, labels)
    found[0].backward()
    assert model.model.layers[-1].mlp.experts.gate_up_proj.grad.any()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == class_names(base)["auto_map"]
    again, loading = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for one, other in zip(found, outputs_of(again, labels), strict=True):
        assert torch.equal(one, other)


def test_head_on_a_causal_model(tmp_path: Path) -> None:
    """What fine-tuning for classification begins with: all is loaded but the head, which is new."""
    tiny_moe_model("llama").save_pretrained(tmp_path)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, output_loading_info=True
    )
    assert loading["missing_keys"] == {"score.weight"}
    assert loading["unexpected_keys"] == {"lm_head.weight"}
    causal = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(
        torch.equal(tensor, causal[name]) for name, tensor in model.state_dict().items() if name != "score.weight"
    )


def test_head_on_a_base_with_experts(tmp_path: Path) -> None:
    """`expand --routing one_per_copy_group` writes such models: Qwen3-MoE's own, with routers of ours."""
    config = tiny_moe("qwen3_moe").config.to_dict() | class_names("qwen3_moe")
    groups = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2, 3, 3], "num_labels": 3}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config | groups))
    randomize(model, 0)
    labels = HEADS["sequence"][1]
    found = outputs_of(model, labels)
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(again).__name__ == "MoesaicQwen3MoeForSequenceClassification"
    for one, other in zip(found, outputs_of(again, labels), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM, AutoModelForQuestionAnswering])
def test_config_may_ask_for_activation_checkpointing(auto: Any) -> None:
    model = auto.from_config(tiny_moe_config("llama", gradient_checkpointing=True))
    assert model.is_activation_checkpointing
    assert all(module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing"))


SHAPES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "some layers and a shared expert": {"moe_layers": [1], "num_shared_experts": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("base", BASES)
def test_every_rule_of_a_plan_is_for_something(base: str, shape: str) -> None:
    model = tiny_moe_model(base, **SHAPES[shape])
    names = {re.sub(r"\.\d+\b", ".*", name) for name, _ in [*model.named_modules(), *model.named_parameters()]}
    assert "model.layers.*.mlp.experts" in model.ep_plan
    for plan in (model.tp_plan, model.ep_plan):
        assert not {re.sub(r"\.\d+\b", ".*", rule) for rule in plan} - names
    assert "base_model_ep_plan" not in model.config.to_dict()


def test_names_of_auto_classes_are_those_of_the_modeling_file() -> None:
    from moesaic.modeling import modeling_moesaic

    assert modeling_moesaic._auto_map("Llama") == class_names("llama")["auto_map"]
    assert set(AUTO_CLASSES.values()) == set(modeling_moesaic._MAKERS)
