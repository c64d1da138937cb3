import subprocess
import sys
from functools import partial

import pytest
import torch

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights
from moesaic.upcycling.method import DenseLayer, ExpertSpec
from moesaic.upcycling.methods import METHODS


def dense_layer(shards: int, *, width: int = 12, specialists: int = 6) -> DenseLayer:
    """FFNs whose numbers say where they are from: 100 * source + neuron."""

    def ffn(source: int) -> ExpertWeights:
        neurons = torch.arange(width).float() + 100 * source
        return ExpertWeights(gate_ID=neurons[:, None], up_ID=neurons[:, None] + 0.25, down_DI=neurons[None] + 0.5)

    spec = ExpertSpec(
        hidden=1, intermediate=width // shards, shards=shards, biases=False, initializer_range=0.02, drop_ratio=0.5,
        drop_indices="per-expert",
    )  # fmt: skip
    made = [ffn(source) for source in range(specialists + 1)]
    return DenseLayer(
        base=made[0], specialists=tuple(made[1:]), experts=6, spec=spec, draw=partial(seeds.generator, 0, "x")
    )


@pytest.mark.parametrize(
    ("method", "shards", "expected"),
    [
        ("sparse", 1, [(0, 0)] * 6),
        ("virtual_group", 2, [(0, 0), (0, 1)] * 3),
        ("virtual_group", 3, [(0, 0), (0, 1), (0, 2)] * 2),
        ("btx", 1, [(1 + i, 0) for i in range(6)]),
        ("divmoe", 2, [(1 + i, j) for i in range(3) for j in range(2)]),
        ("divmoe", 3, [(1 + i, j) for i in range(2) for j in range(3)]),
    ],
)
def test_which_shard_an_expert_is(method, shards, expected):
    """(source, shard) of each expert: the same neurons of gate, up and down."""
    layer = dense_layer(shards, specialists=6 // shards)
    experts = METHODS[method].experts(layer)
    assert len(experts) == 6
    width = 12 // shards
    for expert, (source, shard) in zip(experts, expected, strict=True):
        neurons = torch.arange(width).float() + shard * width + 100 * source
        assert torch.equal(expert.gate_ID[:, 0], neurons)
        assert torch.equal(expert.up_ID[:, 0], neurons + 0.25)
        assert torch.equal(expert.down_DI[0], neurons + 0.5)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_records_are_complete(method):
    assert METHODS[method.name] is method
    sources = dense_layer(2 if method.cuts else 1, specialists=3 if method.cuts else 6)
    known = {value for ffn in (sources.base, *sources.specialists) for value in ffn.gate_ID[:, 0].tolist()}
    made = method.experts(sources)
    assert len(made) == 6
    assert method.preserves == all(value in known for one in made for value in one.gate_ID[:, 0].tolist())
    assert method.cuts or method.default_shards == 1
    assert set(method.auto_router) == {"topk", "one_per_group"}
    assert method.description
    assert method.paper


def test_scratch_draws_with_the_base_s_standard_deviation():
    spec = ExpertSpec(
        hidden=64, intermediate=512, shards=1, biases=True, initializer_range=0.07, drop_ratio=0.5,
        drop_indices="per-expert",
    )  # fmt: skip

    def unread(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=torch.bfloat16)

    base = ExpertWeights(
        gate_ID=unread(512, 64),
        up_ID=unread(512, 64),
        down_DI=unread(64, 512),
        gate_bias_I=unread(512),
        up_bias_I=unread(512),
        down_bias_D=unread(64),
    )
    layer = DenseLayer(base=base, specialists=(), experts=1, spec=spec, draw=partial(seeds.generator, 0, "x"))
    (made,) = METHODS["scratch"].experts(layer)
    for weight in (made.gate_ID, made.up_ID, made.down_DI):
        assert weight.dtype == torch.bfloat16
        assert weight.float().std() == pytest.approx(0.07, rel=0.03)
        assert weight.float().mean() == pytest.approx(0.0, abs=0.002)
    assert made.gate_ID.shape == (512, 64)
    assert made.down_DI.shape == (64, 512)
    for bias in (made.gate_bias_I, made.up_bias_I, made.down_bias_D):
        assert bias is not None
        assert not bias.any()


def test_recipe_methods_and_resolving_import_no_torch():
    program = (
        "import sys, moesaic.upcycling.recipe, moesaic.upcycling.methods, moesaic.upcycling.plan, "
        "moesaic.upcycling.result, moesaic.upcycling.result; "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
