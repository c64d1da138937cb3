"""Every base with every method: convert, load, forward, backward, generate, save, load again, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from moesaic.modeling import register
from moesaic.upcycling.recipe import Specialist, UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.tiny_models import BASES, BASES_WITH_MLP_BIAS, VOCABULARY, save_tiny, save_tiny_gemma3_wrapper

METHODS = ("scratch", "sparse", "drop", "virtual_group", "btx", "divmoe")


@pytest.fixture(scope="module", autouse=True)
def architectures():
    register()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and two specialists of any family, made once; even-numbered families tie their embeddings."""
    made: dict[tuple[str, bool], list[Path]] = {}

    def make(base: str, mlp_bias: bool = False) -> list[Path]:
        if (base, mlp_bias) not in made:
            root, tied = tmp_path_factory.mktemp(base), BASES.index(base) % 2 == 0
            made[base, mlp_bias] = [
                save_tiny(root / str(seed), base, tied=tied, mlp_bias=mlp_bias, seed=seed) for seed in range(3)
            ]
        return made[base, mlp_bias]

    return make


def recipe_for(sources: list[Path], method: Any, **more: Any) -> UpcycleRecipe:
    specialists = ()
    if method in ("btx", "divmoe"):
        specialists = tuple(Specialist(name=f"s{i}", path=str(folder)) for i, folder in enumerate(sources[1:]))
    return UpcycleRecipe(base=str(sources[0]), method=method, specialists=specialists, **more)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("base", BASES)
def test_convert_load_run_train_generate_save_load(folders, tmp_path, base, method):
    upcycle(
        recipe_for(folders(base), method, experts=None if method in ("btx", "divmoe") else 4),
        tmp_path / "moe",
        quiet=True,
    )
    model = load(tmp_path / "moe")
    stored, state = weights(tmp_path / "moe"), model.state_dict()
    tied = model.config.tie_word_embeddings
    assert state.keys() - stored.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(value, state[name]) for name, value in stored.items())

    output = model(tokens(), labels=tokens())
    assert torch.isfinite(output.logits).all()
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert any(p.grad.abs().max() > 0 for n, p in model.named_parameters() if "experts.gate_up_proj" in n)

    generated = model.generate(tokens(1), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert generated.shape == (1, 15)
    model.save_pretrained(tmp_path / "again")
    with torch.no_grad():
        difference = load(tmp_path / "again")(tokens()).logits - model(tokens()).logits
    # The weights below are compared bit for bit; a matrix product's last bit depends on where they lie in memory.
    assert difference.abs().max() < 1e-5
    again = weights(tmp_path / "again")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], value) for name, value in stored.items())


@pytest.mark.parametrize("weighting", ["selected", "all"])
@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("method", ["sparse", "virtual_group", "divmoe"])
@pytest.mark.parametrize("base", BASES)
def test_the_model_computes_what_the_dense_one_does(folders, tmp_path, base, method, shared, weighting):
    """The exact methods through the real model, specialists equal to the base; a flat router for weights over all."""
    source = folders(base)[0]
    recipe = recipe_for(
        [source] * 5,
        method,
        shared_experts=shared,
        weighting=weighting,
        router_std=0.02 if weighting == "selected" else 1e-9,
        layers="all" if method != "divmoe" else "1",
    )
    result = upcycle(recipe, tmp_path / "moe", quiet=True)
    assert result.statement.preserves or result.statement.code == "N2"
    with torch.no_grad():
        difference = load(tmp_path / "moe")(tokens()).logits - load(source)(tokens()).logits
    assert difference.abs().max() < 2e-5


@pytest.mark.parametrize("method", ["virtual_group", "divmoe"])
@pytest.mark.parametrize("base", BASES_WITH_MLP_BIAS)
def test_biases_are_preserved(folders, tmp_path, base, method):
    source = folders(base, mlp_bias=True)[0]
    upcycle(
        recipe_for([source] * 4, method, shards=3, experts=9 if method == "virtual_group" else None, shared_experts=1),
        tmp_path / "moe",
        quiet=True,
    )
    model = load(tmp_path / "moe")
    assert model.config.expert_mlp_bias
    with torch.no_grad():
        difference = model(tokens()).logits - load(source)(tokens()).logits
    assert difference.abs().max() < 2e-5


def test_the_text_model_of_a_multimodal_wrapper(tmp_path):
    source = save_tiny_gemma3_wrapper(tmp_path / "wrapper")
    result = upcycle(recipe_for([source], "virtual_group"), tmp_path / "moe", quiet=True)
    assert any("only the text model is used" in line for line in result.notices)
    model = load(tmp_path / "moe")
    assert type(model).__name__ == "MoesaicGemma3TextForCausalLM"
    from transformers import AutoModelForImageTextToText

    dense = AutoModelForImageTextToText.from_pretrained(source).eval()
    with torch.no_grad():
        ids = tokens() % 80
        difference = model(ids).logits - dense(input_ids=ids).logits
    assert difference.abs().max() < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_many_shards(tmp_path, dtype):
    source = save_tiny(tmp_path / "dense", "llama", dtype=dtype, max_shard_size="10KB")
    assert len(list(source.glob("*.safetensors"))) > 3
    upcycle(recipe_for([source], "virtual_group", shard_size="20KB"), tmp_path / "moe", quiet=True)
    assert len(list((tmp_path / "moe").glob("*.safetensors"))) > 3
    dense, model = load(source), load(tmp_path / "moe")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    with torch.no_grad():
        expected, actual = dense(tokens()).logits.float(), model(tokens()).logits.float()
    assert (actual - expected).norm() / expected.norm() < 0.02


def test_remote_code_loads_without_registration(folders, tmp_path):
    """The copied file alone: a fresh process that cannot import moesaic."""
    import subprocess
    import sys

    upcycle(recipe_for(folders("qwen3"), "divmoe"), tmp_path / "moe", quiet=True)
    program = f"""
import sys
sys.modules["moesaic"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "moe")!r}, trust_remote_code=True)
print(type(model).__name__, model(torch.tensor([[5, 6, 7]])).logits.shape[-1])
"""
    environment = {
        "PATH": "",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["MoesaicQwen3ForCausalLM", str(VOCABULARY)]
