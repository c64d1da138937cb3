"""Names and shapes of a model that starts from random weights, before there are any."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moesaic.errors import MoesaicError
from moesaic.families.counting import Shapes
from moesaic.families.dense_table import FAMILIES
from moesaic.families.shapes import MOE_PREFIX, config_shapes
from moesaic.training.recipe import ScratchModel
from moesaic.training.scratch import scratch_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REASON = 200
"""Characters of another library's error that are shown."""


def scratch_shapes(scratch: ScratchModel) -> tuple[Shapes, Mapping[str, Any]]:
    """Tensor name -> shape, and the config with what counting reads.

    From our tables without torch where they have the family; else from the family's class on the meta device, which has
    shapes and no numbers.

    Raises: `MoesaicError` for a config that makes no model.
    """
    config = scratch_config(scratch)
    model_type = str(config["model_type"])
    if model_type in FAMILIES or model_type.startswith(MOE_PREFIX):
        return config_shapes(config), config
    model = _without_numbers(config)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    text = model.config.get_text_config()
    sizes = {name: getattr(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {**text.to_dict(), **sizes}


def _without_numbers(config: Mapping[str, Any]) -> "PreTrainedModel":
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    model_type = values.pop("model_type")
    try:
        settings = AutoConfig.for_model(model_type, **values)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings)
    except Exception as error:  # whatever the family's classes raise for values that they can't take
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON]
        raise MoesaicError(f"model: no {model_type} can be made of family and config ({reason})") from error
