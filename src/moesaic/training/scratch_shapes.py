"""Names and shapes of a model that starts from random weights, before there are any."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moesaic.families.counting import Shapes, config_shapes
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import MOE_PREFIX
from moesaic.training.recipe import ScratchModel
from moesaic.training.scratch import scratch_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    model = _without_numbers(scratch)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tensors = dict(model.named_parameters())
    tensors |= {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    text = model.config.get_text_config()
    sizes = {name: getattr(text, name) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {**text.to_dict(), **sizes}


def _without_numbers(scratch: ScratchModel) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    from moesaic.training.drawing import make_config, makes_a_model

    config = make_config(scratch)
    with torch.device("meta"), makes_a_model(scratch.family):
        return AutoModelForCausalLM.from_config(config)
