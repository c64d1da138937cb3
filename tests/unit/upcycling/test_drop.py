from functools import partial

import pytest
import torch

from moesaic.common import seeds
from moesaic.families.experts import ExpertWeights
from moesaic.upcycling.method import DenseLayer, ExpertSpec
from moesaic.upcycling.methods import METHODS
from moesaic.upcycling.recipe import DropIndices

HIDDEN, WIDTH = 64, 400


def ffn(biases: bool = False) -> ExpertWeights:
    stream = torch.Generator().manual_seed(0)

    def draw(*shape: int, mean: float, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=stream) * std + mean

    return ExpertWeights(
        gate_ID=draw(WIDTH, HIDDEN, mean=0.5, std=0.1),
        up_ID=draw(WIDTH, HIDDEN, mean=-1.0, std=0.2),
        down_DI=draw(HIDDEN, WIDTH, mean=3.0, std=0.3),
        gate_bias_I=draw(WIDTH, mean=7.0, std=0.5) if biases else None,
        up_bias_I=draw(WIDTH, mean=8.0, std=0.5) if biases else None,
        down_bias_D=draw(HIDDEN, mean=9.0, std=0.5) if biases else None,
    )


def dropped(
    expert: int = 0, ratio: float = 0.5, indices: DropIndices = "per-expert", shards: int = 1, biases: bool = False
):
    """(expert made by drop, the shard that it was made from)."""
    spec = ExpertSpec(
        hidden=HIDDEN,
        intermediate=WIDTH // shards,
        shards=shards,
        biases=biases,
        initializer_range=0.02,
        drop_ratio=ratio,
        drop_indices=indices,
    )
    source = ffn(biases)
    return made_by_drop(source, spec, 0, expert), source.shard(expert % shards, shards)


def made_by_drop(source: ExpertWeights, spec: ExpertSpec, seed: int, expert: int) -> ExpertWeights:
    layer = DenseLayer(
        base=source, specialists=(), experts=expert + 1, spec=spec, draw=partial(seeds.generator, seed, "drop", 0)
    )
    return METHODS["drop"].experts(layer)[expert]


def kept(made: ExpertWeights, source: ExpertWeights) -> list[torch.Tensor]:
    """Per matrix, which neurons are as they were."""
    return [
        (made.gate_ID == source.gate_ID).all(1),
        (made.up_ID == source.up_ID).all(1),
        (made.down_DI == source.down_DI).all(0),
    ]


@pytest.mark.parametrize(("ratio", "intact"), [(0.0, 400), (0.25, 300), (0.5, 200), (0.7525, 99), (1.0, 0)])
def test_per_expert_keeps_an_exact_number_of_whole_neurons(ratio, intact):
    gate, up, down = kept(*dropped(ratio=ratio))
    assert torch.equal(gate, up)
    assert torch.equal(gate, down)
    assert gate.sum() == intact


def test_per_matrix_leaves_an_eighth_of_the_neurons_intact():
    shares = []
    for expert in range(20):
        masks = kept(*dropped(expert, indices="per-matrix"))
        assert [int(mask.sum()) for mask in masks] == [200, 200, 200]
        shares.append((masks[0] & masks[1] & masks[2]).float().mean())
    assert torch.stack(shares).mean() == pytest.approx(0.125, abs=0.01)


def test_a_half_is_rounded_up():
    assert kept(*dropped(ratio=0.5 / 400))[0].sum() == 399


def test_values_come_from_the_moments_of_the_replaced_block_of_each_matrix():
    made, source = dropped()
    masks = kept(made, source)
    for new, old, mask in (
        (made.gate_ID[~masks[0]], source.gate_ID[~masks[0]], "gate"),
        (made.up_ID[~masks[1]], source.up_ID[~masks[1]], "up"),
        (made.down_DI[:, ~masks[2]], source.down_DI[:, ~masks[2]], "down"),
    ):
        assert new.mean() == pytest.approx(float(old.mean()), rel=0.02), mask
        assert new.std() == pytest.approx(float(old.std()), rel=0.02), mask
        assert not (new == old).any()


def test_statistics_are_the_block_s_not_the_matrix_s():
    """Neurons that are far apart: with everything but one neuron kept, the new one looks like the one it replaces."""
    spec = ExpertSpec(
        hidden=HIDDEN, intermediate=2, shards=1, biases=False, initializer_range=0.02, drop_ratio=0.5,
        drop_indices="per-expert",
    )  # fmt: skip
    rows = torch.stack([torch.full((HIDDEN,), 100.0), torch.full((HIDDEN,), -100.0)])
    source = ExpertWeights(gate_ID=rows, up_ID=rows, down_DI=rows.T.contiguous())
    for seed in range(10):
        made = made_by_drop(source, spec, seed, 0)
        assert torch.equal(made.gate_ID, rows)  # each neuron's own mean, and no deviation within it


@pytest.mark.parametrize("expert", [0, 1, 2, 5])
def test_fine_grained_works_on_shard_e_mod_m(expert):
    made, source = dropped(expert, shards=4)
    gate, up, down = kept(made, source)
    assert gate.sum() == 50
    assert torch.equal(gate, up)
    assert torch.equal(gate, down)


def test_experts_lose_different_neurons():
    masks = [kept(*dropped(expert))[0] for expert in range(4)]
    assert all(not torch.equal(masks[0], mask) for mask in masks[1:])


def test_biases_of_gate_and_up_go_with_their_neurons_and_down_keeps_its_own():
    made, source = dropped(biases=True)
    mask = kept(made, source)[0]
    assert made.gate_bias_I is not None
    assert source.gate_bias_I is not None
    assert made.down_bias_D is not None
    assert source.down_bias_D is not None
    assert torch.equal(made.gate_bias_I == source.gate_bias_I, mask)
    assert made.gate_bias_I[~mask].mean() == pytest.approx(7.0, abs=0.2)
    assert torch.equal(made.down_bias_D, source.down_bias_D)
