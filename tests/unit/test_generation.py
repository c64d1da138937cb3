"""Batches of prompts: padding must change nothing, in any family (sliding windows, no rope, MoE)."""

import pytest

from moesaic.generation import _continue, _settings
from tests.tiny_models import BASES, tiny_model, tiny_moe_model

PROMPTS = [[5, 6, 7], [9] * 15, [11], [3, 8, 60, 61, 62, 4, 7]]


@pytest.mark.parametrize("make", [tiny_model, tiny_moe_model])
@pytest.mark.parametrize("base", BASES)
def test_padding_changes_nothing(base, make):
    model = make(base)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.generation_config = _settings(model, 12, 0.0)
    alone = [_continue(model, [prompt], None)[0] for prompt in PROMPTS]
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    assert _continue(model, PROMPTS, None) == alone
