import subprocess
import sys

import pytest
import torch

from moesaic.common.seeds import generator
from moesaic.upcycling.method import ExpertSpec, Shard, build_expert
from moesaic.upcycling.methods import METHODS


@pytest.mark.parametrize(
    ("method", "shards", "expected"),
    [
        ("sparse", 1, [Shard(0, 0)] * 6),
        ("virtual_group", 2, [Shard(0, 0), Shard(0, 1)] * 3),
        ("virtual_group", 3, [Shard(0, 0), Shard(0, 1), Shard(0, 2)] * 2),
        ("btx", 1, [Shard(1 + i, 0) for i in range(6)]),
        ("divmoe", 2, [Shard(1 + i, j) for i in range(3) for j in range(2)]),
        ("divmoe", 3, [Shard(1 + i, j) for i in range(2) for j in range(3)]),
    ],
)
def test_which_shard_an_expert_is(method, shards, expected):
    copies = METHODS[method].copies
    assert copies is not None
    assert [copies(expert, shards) for expert in range(6)] == expected


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_records_are_complete(method):
    assert METHODS[method.name] is method
    assert (method.copies is None) != (method.make is None)
    assert method.preserves == (method.copies is not None)
    assert method.cuts or method.default_shards == 1
    assert set(method.auto_router) == {"topk", "one_per_group"}
    assert method.description
    assert method.paper


def test_scratch_draws_with_the_base_s_standard_deviation():
    class NoSources:
        dtype = torch.bfloat16

        def shard(self, shard):
            raise AssertionError("scratch reads nothing")

    spec = ExpertSpec(
        hidden=64, intermediate=512, shards=1, biases=True, initializer_range=0.07, drop_ratio=0.5,
        drop_indices="per-expert",
    )  # fmt: skip
    made = build_expert(METHODS["scratch"], 0, NoSources(), spec, generator(0, "x"))
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
