import subprocess
import sys

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import dump_recipe, load_recipe
from moesaic.data.recipe import DataRecipe, SourceRecipe

WHOLE = {
    "sequence_length": 4096,
    "sources": [{"path": "math.jsonl", "domain": "math", "weight": 1.5}, {"path": "x", "domain": "chat"}],
    "validation": [{"path": "math.valid.jsonl", "domain": "math"}, {"path": "law", "domain": "law"}],
}


def test_the_schema_of_the_issue(tmp_path):
    recipe = load_recipe(DataRecipe, WHOLE)
    assert recipe.sources[0] == SourceRecipe(path="math.jsonl", domain="math", weight=1.5)
    assert recipe.domains == ("math", "chat", "law")
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert load_recipe(DataRecipe, file) == recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 1}, "sequence_length: must be at least 2 tokens, got 1"),
        ({"sources": []}, "sources: is empty"),
        ({"epochs": 0}, "epochs: must be at least 1, got 0"),
        ({"epochs": 2}, "epochs: reads every source equally often, so weight must be left out"),
        ({"validation": [{"path": "x", "domain": "y", "weight": 2}]}, "validation.0.weight has no meaning"),
        (
            {"sources": [{"path": "x", "domain": "y", "weight": 0}]},
            "sources.0.weight: must be a positive number, got 0",
        ),
        ({"sources": [{"path": "x", "domain": "y", "weight": float("inf")}]}, "sources.0.weight: "),
        ({"sources": [{"path": "", "domain": "y"}]}, "sources.0.path: is empty"),
        ({"sources": [{"path": "x", "domain": ""}]}, "sources.0.domain: is empty"),
        ({"sources": [{"path": "x", "domain": "y", "prompt": "p"}]}, "sources.0.completion: is missing"),
        ({"sources": [{"path": "x", "domain": "y", "completion": "p"}]}, "sources.0.prompt: is missing"),
        ({"sources": [{"path": "x", "domain": "y", "messages": "m", "tokens": "t"}]}, "sources.0.tokens: cannot"),
        ({"sources": [{"path": "x", "domain": "y", "messages": "m", "format": "text"}]}, "sources.0.messages: has no"),
        ({"sources": [{"path": "x", "domain": "y", "mesages": "m"}]}, "messages"),
    ],
)
def test_mistakes_name_the_key(change, message):
    with pytest.raises(MoesaicError) as caught:
        load_recipe(DataRecipe, WHOLE | change)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_recipe_needs_no_torch():
    code = "import sys, moesaic.data.recipe; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("path", "domain"),
    [
        ("in/math.jsonl", "math"),
        ("math.valid.jsonl.zst", "math"),
        ("corpus/code/", "code"),
        ("hf://org/wiki@main:en:train", "wiki"),
    ],
)
def test_a_domain_that_is_left_out_is_the_name_up_to_the_first_dot(path, domain):
    recipe = DataRecipe(sequence_length=8, sources=(SourceRecipe(path=path),), validation=(SourceRecipe(path=path),))
    assert recipe.domains == (domain,)
    assert recipe.sources[0].domain == recipe.validation[0].domain == domain


def test_two_sources_do_not_share_a_domain_that_nobody_named():
    sources = SourceRecipe(path="a/train.jsonl"), SourceRecipe(path="b/train.jsonl")
    with pytest.raises(MoesaicError, match=r"sources.1.domain is left out, and train is another one's; give it a name"):
        DataRecipe(sequence_length=8, sources=sources)
    named = SourceRecipe(path="b/train.jsonl", domain="train")
    assert DataRecipe(sequence_length=8, sources=(sources[0], named)).domains == ("train",)
    with pytest.raises(MoesaicError, match=r"sources.0.domain is missing"):
        DataRecipe(sequence_length=8, sources=(SourceRecipe(path="in/.jsonl"),))
