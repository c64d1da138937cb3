import pytest
import torch

from moesaic.upcycling.experts import ExpertWeights


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


def test_slice_takes_the_same_neurons_everywhere():
    whole = expert()
    part = whole.slice(1, 3)
    assert part.intermediate == 2
    assert torch.equal(part.gate_ID, whole.gate_ID[2:4])
    assert torch.equal(part.up_ID, whole.up_ID[2:4])
    assert torch.equal(part.down_DI, whole.down_DI[:, 2:4])
    assert part.gate_bias_I is not None
    assert whole.gate_bias_I is not None
    assert torch.equal(part.gate_bias_I, whole.gate_bias_I[2:4])


def test_slice_keeps_a_third_of_a_bfloat16_bias_in_float32():
    whole = expert(dtype=torch.bfloat16)
    part = whole.slice(0, 3)
    assert part.down_bias_D is not None
    assert whole.down_bias_D is not None
    assert torch.equal((part.down_bias_D * 3).to(torch.bfloat16), whole.down_bias_D)


@pytest.mark.parametrize(("shard", "shards"), [(0, 4), (3, 3), (-1, 3)])
def test_slice_asserts_that_the_cut_exists(shard, shards):
    with pytest.raises(AssertionError):
        expert().slice(shard, shards)


def test_scale_leaves_what_has_no_factor_alone():
    whole = expert()
    scaled = whole.scale(gate_up=1.0, down=3.0)
    assert scaled.gate_ID is whole.gate_ID
    assert torch.equal(scaled.down_DI, whole.down_DI * 3)
    assert scaled.down_bias_D is not None
    assert whole.down_bias_D is not None
    assert torch.equal(scaled.down_bias_D, whole.down_bias_D * 3)
    assert torch.equal(whole.scale(gate_up=2.0, down=1.0).up_ID, whole.up_ID * 2)


def test_stack_and_its_slices():
    experts = [expert(seed) for seed in range(3)]
    stacked = ExpertWeights.stack(experts)
    assert stacked.gate_ID.shape == (3, 6, 4)
    assert torch.equal(stacked.slice(1, 2).down_DI[2], experts[2].slice(1, 2).down_DI)


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
    assert bare.slice(0, 2).scale(gate_up=2.0, down=2.0).down_bias_D is None
    assert ExpertWeights.stack([bare, bare]).gate_bias_I is None
