"""A layer's experts, read one after the other into the parameters of a module without weights."""

import copy
from typing import Any

import pytest
import torch

from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.families.moe import detect_moe
from moesaic.loading import load
from moesaic.routing.capture import find_block, run_experts
from moesaic.selection.stream import ExpertStacks
from tests.tiny_moes import MOE_FAMILIES, save_tiny_moe


def blocks(model):
    return [block for block in map(find_block, model.model.layers) if block is not None]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_experts_are_those_that_transformers_loads(tmp_path, family, fused):
    folder = save_tiny_moe(tmp_path / "m", family, fused=fused, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(folder)
    model: Any = load(folder, dtype="float32")
    empty = copy.deepcopy(model).to("meta")
    stacks, memory = ExpertStacks(checkpoint), set()
    for layer, block, target in zip(detect_moe(checkpoint).layers, blocks(model), blocks(empty), strict=True):
        stacks.fill(target.experts, layer)
        for name, expected in block.experts.named_parameters():
            found = getattr(target.experts, name)
            assert torch.equal(found, expected), name
            memory.add(found.data_ptr())
    assert len(memory) == len(list(blocks(model)[0].experts.named_parameters()))  # the same for every layer


def test_a_config_of_another_width_is_refused(tmp_path):
    checkpoint = open_checkpoint(save_tiny_moe(tmp_path / "m", "olmoe"))
    other = blocks(load(save_tiny_moe(tmp_path / "other", "olmoe", intermediate_size=24)))[0]
    with pytest.raises(MoesaicError, match=r"m: expert 0 of layer 0 does not have the \[48, 32\] values for gate_up"):
        ExpertStacks(checkpoint).fill(other.experts, detect_moe(checkpoint).layers[0])


@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 300])
def test_rows_added_for_bf16_change_nothing(tmp_path, tokens):
    experts = blocks(load(save_tiny_moe(tmp_path / "m", "qwen3_moe"), dtype="bfloat16"))[0].experts
    hidden_TD = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids_TK = torch.stack([torch.arange(tokens) % 3, torch.full((tokens,), 5)], dim=1)
    weights_TK = torch.full((tokens, 2), 0.5)
    with torch.no_grad():
        sum_TD, norms_TK = run_experts(experts, hidden_TD, ids_TK, weights_TK)
        wide_TD, wide_TK = run_experts(experts.float(), hidden_TD.float(), ids_TK, weights_TK)
    torch.testing.assert_close(sum_TD.float(), wide_TD, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(norms_TK, wide_TK, rtol=3e-2, atol=3e-2)
