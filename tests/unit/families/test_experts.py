from typing import Any

import pytest
import torch

from moesaic.checkpoint import lazy
from moesaic.checkpoint.source import open_checkpoint
from moesaic.families.experts import ExpertWeights, widened
from tests.tiny_files import checkpoint_folder


def expert(seed: int = 0, width: int = 6, hidden: int = 4, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream).to(dtype)

    return ExpertWeights(
        gate_ID=draw(width, hidden),
        up_ID=draw(width, hidden),
        down_DI=draw(hidden, width),
        gate_bias_I=draw(width),
        up_bias_I=draw(width),
        down_bias_D=draw(hidden),
    )


def test_shard_takes_the_same_neurons_everywhere():
    whole = expert()
    part = whole.shard(1, 3)
    assert part.intermediate == 2
    assert torch.equal(part.gate_ID, whole.gate_ID[2:4])
    assert torch.equal(part.up_ID, whole.up_ID[2:4])
    assert torch.equal(part.down_DI, whole.down_DI[:, 2:4])
    assert part.gate_bias_I is not None
    assert whole.gate_bias_I is not None
    assert torch.equal(part.gate_bias_I, whole.gate_bias_I[2:4])


def test_shard_keeps_a_third_of_a_bfloat16_bias_in_float32():
    whole = expert(dtype=torch.bfloat16)
    part = whole.shard(0, 3)
    assert part.down_bias_D is not None
    assert whole.down_bias_D is not None
    assert torch.equal((part.down_bias_D * 3).to(torch.bfloat16), whole.down_bias_D)


@pytest.mark.parametrize(("shard", "shards"), [(0, 4), (3, 3), (-1, 3)])
def test_shard_asserts_that_the_cut_exists(shard, shards):
    with pytest.raises(AssertionError):
        expert().shard(shard, shards)


def test_scale_leaves_what_has_no_factor_alone():
    whole = expert()
    scaled = whole.scale(gate_up=1.0, down=3.0)
    assert scaled.gate_ID is whole.gate_ID
    assert torch.equal(scaled.down_DI, whole.down_DI * 3)
    assert scaled.down_bias_D is not None
    assert whole.down_bias_D is not None
    assert torch.equal(scaled.down_bias_D, whole.down_bias_D * 3)
    assert torch.equal(whole.scale(gate_up=2.0, down=1.0).up_ID, whole.up_ID * 2)


def test_stack_and_its_shards():
    experts = [expert(seed) for seed in range(3)]
    stacked = ExpertWeights.stack(experts)
    assert stacked.gate_ID.shape == (3, 6, 4)
    assert torch.equal(stacked.shard(1, 2).down_DI[2], experts[2].shard(1, 2).down_DI)


def test_concatenate_adds_outputs():
    joined = ExpertWeights.concatenate([expert(0), expert(1)])
    assert joined.gate_ID.shape == (12, 4)
    assert joined.down_DI.shape == (4, 12)
    first, second = expert(0), expert(1)
    assert joined.down_bias_D is not None
    assert first.down_bias_D is not None
    assert second.down_bias_D is not None
    assert torch.equal(joined.down_bias_D, first.down_bias_D + second.down_bias_D)


def test_biases_may_be_absent():
    whole = expert()
    bare = ExpertWeights(gate_ID=whole.gate_ID, up_ID=whole.up_ID, down_DI=whole.down_DI)
    assert bare.shard(0, 2).scale(gate_up=2.0, down=2.0).down_bias_D is None
    assert ExpertWeights.stack([bare, bare]).gate_bias_I is None


@pytest.fixture
def stored(tmp_path):
    """An expert in a file, as expressions, and the same one in memory."""
    memory = expert(dtype=torch.bfloat16)
    tensors = checkpoint_folder(tmp_path, {"model.safetensors": memory.parts()})
    found = open_checkpoint(tensors).tensors
    return ExpertWeights(**{name: lazy.stored(found[name]) for name in memory.parts()}), memory


def same(one: Any, other: Any) -> None:
    assert one.parts().keys() == other.parts().keys()
    for name, value in one.read().parts().items():
        assert torch.equal(value, getattr(other, name)), name
        assert value.dtype == getattr(other, name).dtype, name


def test_expressions_give_what_tensors_give(stored):
    one, other = stored
    same(one, other)
    assert one.dtype == other.dtype == torch.bfloat16
    assert one.intermediate == other.intermediate == 6
    for number in range(3):
        same(one.shard(number, 3), other.shard(number, 3))
        same(one.shard(number, 3).scale(gate_up=3.0, down=1 / 3), other.shard(number, 3).scale(gate_up=3.0, down=1 / 3))
    same(ExpertWeights.concatenate([one, one]), ExpertWeights.concatenate([other, other]))
    doubled, other_doubled = one.scale(gate_up=2.0, down=1.0), other.scale(gate_up=2.0, down=1.0)
    same(ExpertWeights.stack([one, doubled]), ExpertWeights.stack([other, other_doubled]))
    same(widened(one, "F32"), other.map(lambda _, value: value.float()))
    same(widened(one, "BF16"), other)


def test_what_is_computed_is_computed_when_it_is_read(stored):
    one, other = stored
    calls = []

    def function():
        calls.append(1)
        return other.map(lambda _, value: value * 2)

    made = one.made(function)
    assert not calls
    same(made.scale(gate_up=1.0, down=2.0), other.scale(gate_up=2.0, down=4.0))
    assert made.gate_ID.sources == tuple(value.sources[0] for value in one.parts().values())
    assert other.made(function).gate_ID.equal(other.gate_ID * 2)


def test_read_gives_memory_of_its_own():
    whole = expert()
    whole.read().gate_ID.zero_()
    assert whole.gate_ID.any()
