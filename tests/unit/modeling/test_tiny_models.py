from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_models import BASES, BASES_WITH_MLP_BIAS, save_tiny, tiny_model


@pytest.mark.parametrize("base", BASES)
def test_checkpoints_hold_what_the_model_holds(base: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, base, mlp_bias=base in BASES_WITH_MLP_BIAS, max_shard_size="20KB", seed=3)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    expected = tiny_model(base, mlp_bias=base in BASES_WITH_MLP_BIAS, seed=3).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())
