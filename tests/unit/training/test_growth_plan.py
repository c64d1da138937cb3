"""`expand:` in a recipe: its moments, what is refused when it is read, and the sizes that are foretold."""

from typing import Any

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import dump_recipe, load_recipe
from moesaic.common.yaml_text import parse_yaml
from moesaic.expansion.build import build
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.resolve import resolve
from moesaic.training.growth_plan import as_keys, grown
from moesaic.training.recipe import TrainRecipe
from moesaic.training.schedule import Transition, positions
from tests.tiny_moes import save_tiny_moe

VALUES: dict[str, Any] = {
    "model": {"family": "llama", "config": {}},
    "tokenizer": "tokenizer",
    "data": {"sequence_length": 32, "sources": [{"path": "a.jsonl", "domain": "a"}]},
    "optimizer": {"lr": 1e-3},
    "batch": {"tokens": 64},
    "budget": {"steps": 10},
}


def recipe(expand: Any) -> TrainRecipe:
    return load_recipe(TrainRecipe, VALUES | {"expand": expand})


def test_one_expansion_or_a_list_of_them():
    one, two = {"step": 3, "experts": 12}, {"fraction": 0.5, "experts": 16, "optimizer": "scale"}
    assert recipe(one).transitions == recipe([one]).transitions == (Transition(step=3, experts=12),)
    assert recipe([one, two]).transitions[1].optimizer == "scale"
    assert recipe([]).transitions == ()
    loaded = recipe([one, two])
    assert load_recipe(TrainRecipe, parse_yaml(dump_recipe(loaded), "again")) == loaded


def test_moments():
    transitions = (
        Transition(tokens=129, experts=12),
        Transition(fraction=0.36, experts=13),
        Transition(step=7, experts=14),
    )
    assert positions(transitions, steps=10, tokens_per_step=64) == (3, 4, 7)
    assert positions((Transition(fraction=0.01, experts=9),), steps=10, tokens_per_step=64) == (1,)


@pytest.mark.parametrize(
    ("expand", "message"),
    [
        ({"experts": 12}, r"expand: no moment is given: give one of step, tokens and fraction"),
        (
            {"step": 1, "fraction": 0.5, "experts": 12},
            r"expand: more than one moment is given \(step, fraction\): give one",
        ),
        ({"step": 0, "experts": 12}, r"expand\.step: must be greater than 0, got 0; `moesaic expand` grows"),
        ({"fraction": 1.0, "experts": 12}, r"expand\.fraction: must be less than 1, got 1\.0"),
        ({"step": 10, "experts": 12}, r"expand\.0: is after step 10, but the run has 10 steps"),
        ({"tokens": 1e6, "experts": 12}, r"expand\.0: is after step 15,625, but the run has 10 steps"),
        (
            [{"step": 3, "experts": 9}, {"fraction": 0.3, "experts": 12}],
            r"expand\.1: is after step 3, but the expansion",
        ),
        ([{"step": 3, "experts": 9}, {"step": 4, "experts": 0}], r"expand\.1\.experts: must be at least 1, got 0"),
        ({"step": 3, "experts": 9, "utility": "fisher"}, r"expand\.utility: 'fisher' is not allowed"),
        ({"step": 3, "experts": 9, "optimiser": "copy"}, r"expand\.optimiser: unknown key; did you mean 'optimizer'"),
        ({"step": 3, "experts": 9, "delta": -1}, r"expand\.delta: must be a finite number that is not negative"),
        ({"step": 3, "experts": 9, "calibration": []}, r"expand\.calibration: unknown key"),
        ({"step": 3}, r"expand\.experts: this key is required"),
    ],
)
def test_what_is_refused_when_a_recipe_is_read(expand, message):
    with pytest.raises(MoesaicError, match=message) as error:
        recipe(expand)
    assert "\n" not in str(error.value)


def test_flags_in_messages_become_keys():
    assert (
        as_keys("--experts 33 needs more than --cap 3; --top-k-x no-op")
        == "experts 33 needs more than cap 3; top_k_x no-op"
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoe", "granitemoeshared", "deepseek_v3"])
def test_foretold_sizes_are_those_of_the_verb(tmp_path, family, fused):
    source = save_tiny_moe(tmp_path / "source", family, fused=fused)
    for routing in ("plain", "one_per_copy_group"):
        plan = resolve(ExpandRecipe(checkpoint=str(source), experts=12, routing=routing))
        made = build(plan, plan.copies({}), {})
        config, shapes = grown(plan)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in made.tensors.items()}
        assert config == made.config
