"""Tiny models with routers and packed batches for the tests of `routing`."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moesaic.modeling import modeling_moesaic
from moesaic.routing.pools import RoutingContext
from tests.tiny_models import VOCABULARY, randomize, tiny_config
from tests.tiny_moes import tiny_moe

NATIVE = ("olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "mixtral", "granitemoe", "granitemoeshared")


def moesaic_model(*, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Our architecture on a Qwen3 base with 8 experts, top-2, two MoE layers of three."""
    fields = tiny_config("qwen3", num_layers=3).to_dict()
    own = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_layers": [0, 2]}
    for key in ("model_type", "architectures", "transformers_version", "dtype"):
        fields.pop(key, None)
    model = modeling_moesaic.MoesaicQwen3ForCausalLM(modeling_moesaic.MoesaicQwen3Config(**(fields | own | changes)))
    randomize(model, seed)
    sharpen(model)
    return model.eval()


def native_model(family: str, **changes: Any) -> PreTrainedModel:
    model = tiny_moe(family, **changes)
    sharpen(model)
    return model


def sharpen(model: PreTrainedModel) -> None:
    """Make routers confident, so that rounding cannot reorder experts and pools differ between documents."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight") or name.endswith("router.weight"):
                parameter.mul_(4.0)


def positions(document_ids_BS: Tensor) -> Tensor:
    """Positions that restart with each document, padding being its own."""
    result = torch.zeros_like(document_ids_BS)
    for row, ids in enumerate(document_ids_BS.tolist()):
        for t in range(1, len(ids)):
            result[row, t] = result[row, t - 1] + 1 if ids[t] == ids[t - 1] else 0
    return result


def packed(document_ids_BS: Tensor, *, inputs_seed: int = 0, **keys: Any) -> tuple[dict[str, Any], RoutingContext]:
    """Random tokens for these documents: the model's arguments, and the routing context."""
    generator = torch.Generator().manual_seed(inputs_seed)
    inputs = {
        "input_ids": torch.randint(3, VOCABULARY, document_ids_BS.shape, generator=generator),
        "position_ids": positions(document_ids_BS),
        "use_cache": False,
    }
    return inputs, RoutingContext.from_sequences(document_ids_BS, **keys)
