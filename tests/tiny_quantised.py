"""Tiny checkpoints with quantised weights: codes and scales drawn at random, and what they mean computed naively."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_moes import save_tiny_moe

BLOCK = 16
GROUP = 8

FAMILIES = {"mxfp4": "gpt_oss", "fp8": "deepseek_v3", "int4": "qwen3_moe"}
SIZES: dict[str, dict[str, Any]] = {
    "mxfp4": {"hidden_size": 64, "intermediate_size": 32},
    "fp8": {"intermediate_size": 40},
    "int4": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
                },
            }
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
}  # fmt: skip


def tiny_quantised(folder: Path, kind: str, **options: Any) -> Path:
    """A tiny MoE whose expert matrices (fp8: those of attention as well) are quantised."""
    save_tiny_moe(folder, FAMILIES[kind], fused=kind == "mxfp4", dtype=torch.bfloat16, **(SIZES[kind] | options))
    return quantise(folder, kind)


def quantise(folder: Path, kind: str) -> Path:
    """The same checkpoint with random codes and scales in place of its matrices."""
    stream = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        made |= _DRAW[kind](name, tensor, stream) if _is_quantised(name, tensor, kind) else {name: tensor}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SETTINGS[kind]}))
    return folder


def _is_quantised(name: str, tensor: Tensor, kind: str) -> bool:
    if kind == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    matrices = tensor.ndim == 2 and "layers." in name and "gate.weight" not in name
    return matrices and (kind == "fp8" or ".experts." in name or "mlp." in name)


def _draw_mxfp4(name: str, tensor: Tensor, stream: torch.Generator) -> dict[str, Tensor]:
    experts, inputs, outputs = tensor.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=stream, dtype=torch.uint8)
    scales = torch.randint(118, 127, blocks.shape[:-1], generator=stream, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _draw_fp8(name: str, tensor: Tensor, stream: torch.Generator) -> dict[str, Tensor]:
    codes = torch.randn(tensor.shape, generator=stream).mul(20).to(torch.float8_e4m3fn)
    grid = [-(-size // BLOCK) for size in tensor.shape]
    return {name: codes, f"{name}_scale_inv": torch.rand(grid, generator=stream).add(0.1).div(100)}


def _draw_int4(name: str, tensor: Tensor, stream: torch.Generator) -> dict[str, Tensor]:
    rows, columns = tensor.shape
    words = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=stream, dtype=torch.int64)
    scales = torch.rand((rows, columns // GROUP), generator=stream).add(0.1).div(20).bfloat16()
    shape = torch.tensor(list(tensor.shape), dtype=torch.int32)
    return {f"{name}_packed": words.to(torch.int32), f"{name}_scale": scales, f"{name}_shape": shape}


_DRAW: dict[str, Callable[[str, Tensor, torch.Generator], dict[str, Tensor]]] = {
    "mxfp4": _draw_mxfp4,
    "fp8": _draw_fp8,
    "int4": _draw_int4,
}


def naive(tensors: dict[str, Tensor], name: str) -> Tensor:
    """The numbers of a tensor in float64, from the definitions of the formats, one by one."""
    if (codes := tensors.get(f"{name}_blocks")) is not None:
        magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        scales = tensors[f"{name}_scales"]
        rows: list[list[float]] = []
        for row, exponents in zip(codes.flatten(0, 1).tolist(), scales.flatten(0, 1).tolist(), strict=True):
            numbers: list[float] = []
            for block, exponent in zip(row, exponents, strict=True):
                for byte in block:
                    for code in (byte & 15, byte >> 4):
                        numbers.append((-1) ** (code >> 3) * magnitudes[code & 7] * 2.0 ** (exponent - 127))
            rows.append(numbers)
        return torch.tensor(rows, dtype=torch.float64).view(*codes.shape[:2], -1).transpose(1, 2)
    if (codes := tensors.get(f"{name}_packed")) is not None:
        scales = tensors[f"{name}_scale"].double().tolist()
        words = [[word % 2**32 for word in row] for row in codes.tolist()]
        integers = [[(word >> 4 * place) % 16 - 8 for word in row for place in range(8)] for row in words]
        return torch.tensor(
            [[v * scales[r][c // GROUP] for c, v in enumerate(row)] for r, row in enumerate(integers)],
            dtype=torch.float64,
        )
    codes, scales = tensors[name].double(), tensors[f"{name}_scale_inv"].double()
    block_rows, block_columns = (torch.arange(size) // BLOCK for size in codes.shape)
    return codes * scales[block_rows][:, block_columns]
