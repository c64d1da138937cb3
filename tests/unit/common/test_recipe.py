"""Recipes, with the schema shape of the training issue: nested, lists of objects, unions, free numbers."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import dump_recipe, load_recipe
from moesaic.common.yaml_text import dump_yaml, parse_yaml


@dataclass(frozen=True, kw_only=True)
class FromScratch:
    family: str
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    domain: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Data:
    sequence_length: int
    sources: tuple[Source, ...]
    validation: tuple[Source, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    lr: float = 1e-4
    schedule: Literal["cosine", "linear"] = "cosine"
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0

    def __post_init__(self):
        if self.lr <= 0:
            raise MoesaicError(f"lr must be positive, got {self.lr}")


@dataclass(frozen=True, kw_only=True)
class Budget:
    steps: int | None = None
    tokens: int | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.tokens is None):
            raise MoesaicError("give either steps or tokens")


@dataclass(frozen=True, kw_only=True)
class Train:
    model: str | FromScratch
    data: Data
    budget: Budget
    optimizer: Optimizer = field(default_factory=Optimizer)
    tokenizer: Path | None = None
    pool_size: int | tuple[int, int] | None = None
    cpu_offload: bool = False
    seed: int = 0


RECIPE = """
model: HuggingFaceTB/SmolLM2-135M
data:
  sequence_length: 4_096
  sources: [{path: math.jsonl, domain: math, weight: 1.0}, {path: code.jsonl, domain: code}]
optimizer: {lr: 5e-4, betas: [0.9, 0.95]}
budget: {tokens: 500e9}
pool_size: [8, 127]
"""


@pytest.fixture
def recipe_file(tmp_path):
    def write(text):
        file = tmp_path / "recipe.yaml"
        file.write_text(text)
        return file

    return write


def refusal(file, *overrides):
    with pytest.raises(MoesaicError) as error:
        load_recipe(Train, file, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_load_gives_typed_values(recipe_file):
    train = load_recipe(Train, recipe_file(RECIPE))
    assert train == Train(
        model="HuggingFaceTB/SmolLM2-135M",
        data=Data(
            sequence_length=4096,
            sources=(
                Source(path=Path("math.jsonl"), domain="math", weight=1.0),
                Source(path=Path("code.jsonl"), domain="code", weight=1.0),
            ),
        ),
        optimizer=Optimizer(lr=5e-4, betas=(0.9, 0.95)),
        budget=Budget(tokens=500_000_000_000),
        pool_size=(8, 127),
    )
    assert type(train.budget.tokens) is int
    assert type(train.data.sources[1].weight) is float


def test_round_trip(recipe_file):
    train = load_recipe(Train, recipe_file(RECIPE))
    assert load_recipe(Train, recipe_file(dump_recipe(train))) == train


def test_mapping_as_source_is_not_changed():
    values = {"model": "m", "data": {"sequence_length": 8, "sources": []}, "budget": {"steps": 1}}
    assert load_recipe(Train, values, ["data.sequence_length=16"]).data.sequence_length == 16
    assert values["data"]["sequence_length"] == 8


@pytest.mark.parametrize(
    ("override", "pick", "value"),
    [
        ("optimizer.lr=1e-3", lambda train: train.optimizer.lr, 1e-3),
        ("data.sources.1.weight=2", lambda train: train.data.sources[1].weight, 2.0),
        ("data.sources.0={path: a.txt, domain: b}", lambda train: train.data.sources[0].path, Path("a.txt")),
        ("optimizer.clip=null", lambda train: train.optimizer.clip, None),
        ("optimizer.betas=[0.8, 0.9]", lambda train: train.optimizer.betas, (0.8, 0.9)),
        ("pool_size=16", lambda train: train.pool_size, 16),
        ("cpu_offload=true", lambda train: train.cpu_offload, True),
        ("model={family: llama, config: {rope_theta: 1e6}}", lambda train: train.model.config["rope_theta"], 1e6),
        ("model=a=b", lambda train: train.model, "a=b"),
        ("tokenizer=12", lambda train: train.tokenizer, Path("12")),
    ],
)
def test_override(recipe_file, override, pick, value):
    assert pick(load_recipe(Train, recipe_file(RECIPE), [override])) == value


def test_override_creates_a_section_and_keeps_its_other_defaults(recipe_file):
    text = RECIPE.replace("optimizer: {lr: 5e-4, betas: [0.9, 0.95]}", "optimizer: null")
    assert load_recipe(Train, recipe_file(text), ["optimizer.lr=2"]).optimizer == Optimizer(lr=2.0)


def test_flags_win_and_name_themselves(recipe_file):
    file = recipe_file(RECIPE)
    assert load_recipe(Train, file, ["seed=1"], flags={"seed": 2}).seed == 2
    with pytest.raises(MoesaicError, match=r"^--pool-size: expected a whole number or a list or null, got 'many'"):
        load_recipe(Train, file, flags={"pool_size": "many"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "--set: optimizer.lrr: unknown key; did you mean 'lr'?"),
        ("optimiser.lr=1", "recipe.yaml (with --set optimiser.lr): optimiser: unknown key; did you mean 'optimizer'?"),
        ("xyz=1", "--set: xyz: unknown key; known: model, data, budget"),
        ("data.sources.0.wieght=1", "--set: data.sources.0.wieght: unknown key; did you mean 'weight'?"),
        ("data.sources.5.weight=1", "--set data.sources.5.weight=1: '5' is not an index of this list; allowed: 0 to 1"),
        ("data.sources.-1.weight=1", "'-1' is not an index"),
        ("model.family=llama", "model is 'HuggingFaceTB/SmolLM2-135M', which has no keys; set model as a whole"),
        ("optimizer.lr", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("seed=[1", "--set seed=[1, line 1: not valid YAML"),
        ("optimizer.lr=high", "--set: optimizer.lr: expected a finite number, got 'high'"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a finite number, got nan"),
        ("optimizer.lr=1e999", "optimizer.lr: expected a finite number, got inf"),
        ("optimizer.lr=true", "optimizer.lr: expected a finite number, got true"),
        ("optimizer.lr=-1", "optimizer.lr: must be positive, got -1"),
        ("optimizer.lr=null", "optimizer.lr: expected a finite number, got null"),
        ("seed=1.5", "seed: expected a whole number, got 1.5"),
        ("seed=", "seed: expected a whole number, got null"),
        ("cpu_offload=1", "cpu_offload: expected true or false, got 1"),
        ("cpu_offload=yes", "cpu_offload: expected true or false, got 'yes'"),
        ("optimizer.schedule=cosin", "'cosin' is not allowed: one of 'cosine', 'linear'; did you mean 'cosine'?"),
        ("optimizer.schedule=7", "optimizer.schedule: 7 is not allowed: one of 'cosine', 'linear'"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected 2 values, got 1: [0.9]"),
        ("optimizer.betas=0.9", "optimizer.betas: expected a list, got 0.9"),
        ("optimizer.betas=[0.9, x]", "optimizer.betas.1: expected a finite number, got 'x'"),
        ("pool_size=x", "pool_size: expected a whole number or a list or null, got 'x'"),
        ("pool_size=[1, x]", "pool_size.1: expected a whole number, got 'x'"),
        ("model={famly: llama}", "model.famly: unknown key; did you mean 'family'?"),
        ("model={}", "model.family: this key is required and missing"),
        ("model=1.5", "model: expected text or keys and values (family, config), got 1.5"),
        ("tokenizer=true", "tokenizer: expected text, got true; put it in quotes"),
        ("budget.steps=3", "recipe.yaml (with --set budget.steps): budget: give either steps or tokens"),
        ("data=7", "data: expected keys and values (sequence_length, sources, validation), got 7"),
        ("data.sources={a: b}", "data.sources: expected a list, got {'a': 'b'}"),
    ],
)
def test_wrong_override_is_named(recipe_file, override, message):
    assert message in refusal(recipe_file(RECIPE), override)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RECIPE + "seeds: 1\n", ": seeds: unknown key; did you mean 'seed'?"),
        (RECIPE + "model: other\n", ", line 9: not valid YAML: the key 'model' is there twice (first in line 2)"),
        (RECIPE.replace("lr: 5e-4", "lr: 5e-4, lr: 1"), "the key 'lr' is there twice"),
        (RECIPE.replace("model: ", "# "), ": model: this key is required and missing"),
        (
            RECIPE.replace("domain: code", "domain: 1.5"),
            ": data.sources.1.domain: expected text, got 1.5; put it in quotes",
        ),
        (RECIPE + "? [1, 2]\n: 3\n", "a key must be a single word or text"),
        (RECIPE + "tokenizer: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        (RECIPE + "a: &a [*a]\n", "not valid YAML"),
        (RECIPE + "3: 4\n", ": 3: unknown key"),
        ("model: [1\n", "not valid YAML"),
        ("a: b: c\n", "not valid YAML"),
        ("---\na: 1\n---\nb: 2\n", "not valid YAML"),
        ("", "expected keys and values, got an empty file"),
        ("- 1\n", "expected keys and values, got list"),
        ("a: \x00\n", "not valid YAML"),
    ],
)
def test_wrong_file_is_named(recipe_file, text, message):
    file = recipe_file(text)
    got = refusal(file)
    assert got.startswith(str(file))
    assert message in got


def test_unreadable_files(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "none.yaml")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"a: \xff\xfe")
    assert "not a YAML text file (byte 3 is not UTF-8)" in refusal(binary)


def test_words_that_yaml_1_1_changes_stay_what_they_are():
    text = "[no, on, 12:30, 2026-01-01, 010, 0x1F, 1e3, 1_000, 5e-4, 1., .5, -3, ~, null, 'true', TRUE]"
    expected = [
        "no",
        "on",
        "12:30",
        "2026-01-01",
        "010",
        "0x1F",
        1e3,
        "1_000",
        5e-4,
        1.0,
        0.5,
        -3,
        None,
        None,
        "true",
        True,
    ]
    assert parse_yaml(text, "test") == expected


def test_merge_keys_may_be_overridden():
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "test")["b"] == {"x": 1, "y": 3}


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda items: st.lists(items) | st.dictionaries(st.text(), items),
    max_leaves=20,
)


@given(plain_values)
def test_plain_data_survives_yaml(value):
    back = parse_yaml(dump_yaml(value), "test")
    assert back == value
    assert repr(back) == repr(value)  # 1, 1.0 and true are equal to Python


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(), st.integers(-(1 << 64) + 1, (1 << 64) - 1))
def test_typed_values_survive_yaml(weight, domain, seed):
    source = Source(path=Path("a"), domain=domain, weight=weight)
    data = Data(sequence_length=1, sources=(source,))
    train = Train(model="m", data=data, budget=Budget(steps=1), seed=seed)
    assert load_recipe(Train, parse_yaml(dump_recipe(train), "test")) == train


def test_a_check_that_names_its_option_stays_as_it_is():
    @dataclass(frozen=True, kw_only=True)
    class Sized:
        size: int

        def __post_init__(self) -> None:
            raise MoesaicError(f"--size {self.size}: too large; at most 3")

    with pytest.raises(MoesaicError, match=r"^--size 4: too large"):
        load_recipe(Sized, {"size": 4})
