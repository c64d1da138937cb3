"""Registration whatever is imported first, and loading where moesaic is not installed (each in a fresh interpreter)."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.modeling import modeling_file
from tests.tiny_models import BASES, tiny_moe_model

GROUPS: dict[str, Any] = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2], "moe_layers": [1]}


def python(code: str, *arguments: object, cache: Path) -> str:
    """Run code in a fresh interpreter whose remote-code cache is empty; return what it prints."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ | {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_moesaic_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = """
        import sys
        import moesaic, moesaic.modeling
        moesaic.modeling.class_names("llama")
        print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
    """
    assert python(code, cache=tmp_path).strip() == "[]"


@pytest.mark.parametrize(
    "imports",
    [
        "import moesaic; import transformers",
        "import transformers; import moesaic",
        "from transformers import AutoConfig; import moesaic",
        "from transformers import AutoModelForCausalLM, AutoModel; import moesaic",
        "from transformers import AutoTokenizer, LlamaForCausalLM; import moesaic",
        "import moesaic; from transformers import AutoModelForCausalLM",
        "import moesaic.modeling.modeling_moesaic",
    ],
)
def test_auto_classes_know_the_architectures_in_every_order_of_imports(imports: str, tmp_path: Path) -> None:
    tiny_moe_model("llama", **GROUPS).save_pretrained(tmp_path / "model")
    code = f"""
        import sys
        {imports}
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        print(type(AutoConfig.from_pretrained(sys.argv[1])).__module__)
        print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__module__)
        print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__module__)
        print(AutoModel.from_config(AutoConfig.from_pretrained(sys.argv[1])).__class__.__name__)
    """
    here = "moesaic.modeling.modeling_moesaic"
    found = python(code, tmp_path / "model", cache=tmp_path / "cache").split()
    assert found == [here, here, here, "MoesaicLlamaModel"]


def test_a_tokenizer_does_not_cost_the_models(tmp_path: Path) -> None:
    code = """
        import sys, moesaic
        from transformers import AutoTokenizer
        print("moesaic.modeling.modeling_moesaic" in sys.modules)
    """
    assert python(code, cache=tmp_path).strip() == "False"


WITHOUT_MOESAIC = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "moesaic":
                raise ModuleNotFoundError(f"No module named {name!r}")

    sys.meta_path.insert(0, Blocker())
    import torch
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    ids = torch.arange(3, 23).view(2, 10)
    for folder in sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
        logits = model(ids).logits
        hidden = AutoModel.from_pretrained(folder, trust_remote_code=True)(ids).last_hidden_state
        assert hidden.shape == (2, 10, 32)
        for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
            auto = getattr(transformers, "AutoModelFor" + task)
            head = auto.from_pretrained(folder, trust_remote_code=True, num_labels=3)
            assert type(head).__module__.startswith("transformers_modules."), type(head).__module__
            assert head.model(ids).last_hidden_state.equal(hidden)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        out = folder + "-out"
        model.save_pretrained(out)
        again = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        torch.testing.assert_close(again(ids).logits, logits, rtol=1e-5, atol=1e-5)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        assert AutoModelForCausalLM.from_config(config, trust_remote_code=True).config.num_experts == 6
        torch.save({"logits": logits.detach(), "tokens": tokens}, out + "/found.pt")
    assert not any(name.split(".")[0] == "moesaic" for name in sys.modules)
"""


def test_remote_code_works_without_moesaic(tmp_path: Path) -> None:
    more = {"selection_bias": True, "routed_scaling_factor": 1.5}
    models = {base: tiny_moe_model(base, **GROUPS, **more) for base in BASES}
    for number, model in enumerate(models.values()):
        for name, bias_E in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias_E.copy_(0.3 * torch.randn(6, generator=torch.Generator().manual_seed(number)))
    for base, model in models.items():
        model.save_pretrained(tmp_path / base)
        assert (tmp_path / base / "modeling_moesaic.py").read_bytes() == modeling_file().read_bytes()
    python(WITHOUT_MOESAIC, *(tmp_path / base for base in BASES), cache=tmp_path / "cache")
    ids = torch.arange(3, 23).view(2, 10)
    for base, model in models.items():
        out = tmp_path / f"{base}-out"
        found = torch.load(out / "found.pt")
        torch.testing.assert_close(found["logits"], model(ids).logits, rtol=1e-5, atol=1e-5)
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert found["tokens"].equal(expected), base
        assert (out / "modeling_moesaic.py").read_bytes() == modeling_file().read_bytes()


def test_an_older_transformers_is_named_in_one_line(tmp_path: Path) -> None:
    code = """
        import runpy, sys
        sys.modules["transformers.initialization"] = None  # which came with 5
        try:
            runpy.run_path(sys.argv[1])
        except ImportError as error:
            print(error)
    """
    said = python(code, modeling_file(), cache=tmp_path)
    assert said.splitlines() == ["this model needs transformers 5.24 or newer: pip install --upgrade transformers"]
