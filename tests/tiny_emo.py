"""A tiny checkpoint of the form that EMO was released in, and what it computes, naively in float64.

Names and config keys are those of the public repository allenai/EMO: all experts under `mlp.experts`, the shared one
last, its row of the router included; norms named after what they come before.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

EXPERTS, SHARED, TOP_K = 9, 1, 4
CONFIG: dict[str, Any] = {
    "architectures": ["EmoForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_emo.EmoConfig", "AutoModelForCausalLM": "modeling_emo.EmoForCausalLM"},
    "model_type": "emo",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": -1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_shared_experts": SHARED,
    "norm_topk_prob": False,
    "num_experts_per_layer": None,
    "always_active_experts": None,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float32",
}


def emo_tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the released names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    made = {"model.embed_tokens.weight": draw(vocab, hidden), "lm_head.weight": draw(vocab, hidden)}
    made["model.norm.weight"] = 1 + draw(hidden)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        for norm in ("pre_attention_layernorm", "pre_feedforward_layernorm"):
            made[f"{place}{norm}.weight"] = 1 + draw(hidden)
        for name in "qkvo":
            made[f"{place}self_attn.{name}_proj.weight"] = draw(hidden, hidden)
        made[f"{place}mlp.gate.weight"] = draw(config["num_experts"], hidden) * 3
        for expert in range(config["num_experts"]):
            own = f"{place}mlp.experts.{expert}."
            made[f"{own}gate_proj.weight"] = draw(width, hidden)
            made[f"{own}up_proj.weight"] = draw(width, hidden)
            made[f"{own}down_proj.weight"] = draw(hidden, width)
    return made


def save_tiny_emo(folder: Path, *, dtype: torch.dtype = torch.float32, drop: str | None = None, **config: Any) -> Path:
    """Write the checkpoint; `drop` leaves one tensor out."""
    folder.mkdir()
    settings = {**CONFIG, **config}
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in emo_tensors(settings).items() if name != drop}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def naive_emo_block(weights: dict[str, Tensor], place: str, states_TD: Tensor, config: dict[str, Any]) -> Tensor:
    """One EMO layer's experts, token by token: softmax over the routed ones, top-k of them, plus the shared one."""
    routed = config["num_experts"] - config["num_shared_experts"]
    active = config["num_experts_per_tok"] - config["num_shared_experts"]

    def expert(number: int, x_D: Tensor) -> Tensor:
        gate, up, down = (weights[f"{place}experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        inner = gate @ x_D
        return down @ (inner / (1 + (-inner).exp()) * (up @ x_D))

    outputs = []
    for x_D in states_TD:
        logits = weights[f"{place}gate.weight"] @ x_D
        scores = logits[:routed].exp() / logits[:routed].exp().sum()
        chosen = sorted(range(routed), key=lambda number: -scores[number].item())[:active]
        y_D = sum(scores[number] * expert(number, x_D) for number in chosen)
        for number in range(routed, config["num_experts"]):
            y_D = y_D + expert(number, x_D)  # a softmax over a single shared expert is 1
        outputs.append(y_D)
    return torch.stack(outputs)


def naive_emo(tokens_T: Tensor, config: dict[str, Any] = CONFIG, seed: int = 0) -> Tensor:
    """Logits (tokens, vocabulary) of one sequence in float64."""
    weights = {name: tensor.double() for name, tensor in emo_tensors(config, seed).items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size, length = hidden // heads, len(tokens_T)

    def norm(states_TD: Tensor, name: str) -> Tensor:
        mean = (states_TD**2).mean(-1, keepdim=True)
        return states_TD / (mean + config["rms_norm_eps"]).sqrt() * weights[name]

    angles = torch.arange(length)[:, None] / config["rope_theta"] ** (torch.arange(0, size, 2).double() / size)

    def turn(x_TE: Tensor) -> Tensor:
        first, second = x_TE[:, : size // 2], x_TE[:, size // 2 :]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    states_TD = weights["model.embed_tokens.weight"][tokens_T]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        x_TD = norm(states_TD, f"{place}pre_attention_layernorm.weight")
        q_TD, k_TD, v_TD = (x_TD @ weights[f"{place}self_attn.{name}_proj.weight"].T for name in "qkv")
        mixed = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            scores_TT = turn(q_TD[:, part]) @ turn(k_TD[:, part]).T / math.sqrt(size)
            scores_TT = scores_TT.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            mixed.append(scores_TT.softmax(-1) @ v_TD[:, part])
        states_TD = states_TD + torch.cat(mixed, -1) @ weights[f"{place}self_attn.o_proj.weight"].T
        x_TD = norm(states_TD, f"{place}pre_feedforward_layernorm.weight")
        states_TD = states_TD + naive_emo_block(weights, f"{place}mlp.", x_TD, config)
    return norm(states_TD, "model.norm.weight") @ weights["lm_head.weight"].T
