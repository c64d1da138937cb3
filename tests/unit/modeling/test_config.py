import pytest

import moesaic  # noqa: F401
from moesaic.common.errors import MoesaicError
from moesaic.modeling import class_names, modeling_file
from moesaic.modeling.names import STEMS
from tests.tiny_models import BASES, tiny_moe_config

PER_GROUP = {"routing_rule": "one_per_group"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok is 7: there are only 6 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0: it must be at least 1"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1"),
        ({"routing_rule": "top_k"}, "routing_rule is 'top_k': it must be one of topk, one_per_group"),
        ({"routing_weighting": "none"}, "routing_weighting is 'none': it must be one of selected, all"),
        ({"group_score": "sum"}, "group_score is 'sum': it must be one of max, mean, log_mean_exp"),
        ({"moe_layers": [0, 2]}, "it must list layers from 0 to 1"),
        ({"moe_layers": [1, 0]}, "rising order"),
        (PER_GROUP, "needs expert_groups"),
        (PER_GROUP | {"expert_groups": [0, 0, 1]}, "expert_groups has 3 entries: .* each of the 6 experts"),
        (PER_GROUP | {"expert_groups": [0] * 6}, "at most one expert from each of the 1 groups"),
        (PER_GROUP | {"expert_groups": [[0, 0, 0, 1, 1, 1]]}, "expert_groups has 1 lists: .* 2 MoE layers"),
    ],
)
def test_impossible_configurations_are_refused_in_one_line(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tiny_moe_config("llama", **changes)
    assert "\n" not in str(error.value)


def test_defaults() -> None:
    config = tiny_moe_config("llama", moe_intermediate_size=None, num_layers=3)
    assert config.moe_layers == [0, 1, 2]
    assert config.moe_intermediate_size == config.intermediate_size == 48
    assert type(config)().num_experts >= type(config)().num_experts_per_tok


@pytest.mark.parametrize("base", BASES)
def test_names_without_torch_are_those_of_the_classes(base: str) -> None:
    config = tiny_moe_config(base)
    names = class_names(base)
    assert type(config).model_type == names["model_type"]
    assert config.auto_map == names["auto_map"]
    assert f"modeling_moesaic.{type(config).__name__}" == names["auto_map"]["AutoConfig"]


def test_every_base_has_names() -> None:
    assert set(STEMS) >= set(BASES)
    assert modeling_file().name == "modeling_moesaic.py"
    with pytest.raises(MoesaicError, match="model_type 'gpt2' has no MoE architecture; the bases that have one are ll"):
        class_names("gpt2")
