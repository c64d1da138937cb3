"""A model that starts from random weights: its configuration, and the weights drawn from the seed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesaic.common.errors import MoesaicError, suggest
from moesaic.training.recipe import ScratchModel
from moesaic.training.scratch import scratch_config

_UNDECLARED = {"head_dim", "partial_rotary_factor", "sliding_window_pattern", "mlp_bias"}
"""What several families, or our experts (`mlp_bias`), read though the configuration's class does not declare it."""

_REASON = 200
"""Characters of another library's error that are shown."""

_MISTAKES = (
    *(StrictDataclassError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
    *(AssertionError, RuntimeError),
)
"""What transformers and torch raise for a value that makes no model, sooner or later."""


@contextmanager
def makes_a_model(family: str) -> Iterator[None]:
    """Turn what is raised for a wrong value in a recipe's configuration into a `MoesaicError` of one line."""
    try:
        yield
    except (MoesaicError, torch.OutOfMemoryError):
        raise
    except _MISTAKES as error:
        reason = " ".join(str(error).split())[:_REASON]
        raise MoesaicError(
            f"model.config: makes no {family} model ({type(error).__name__}: {reason}); correct it"
        ) from error


def make_config(scratch: ScratchModel) -> PreTrainedConfig:
    """The configuration that a recipe describes.

    Raises: `MoesaicError` for a family that is unknown, or a value that its class does not take.
    """
    values: dict[str, Any] = scratch_config(scratch)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        hint = suggest(scratch.family, CONFIG_MAPPING)
        raise MoesaicError(f"model.family: {scratch.family} is no model type of transformers; {hint}")
    with makes_a_model(scratch.family):
        return AutoConfig.for_model(model_type, **values)


def refuse_unknown_keys(scratch: ScratchModel) -> None:
    """Refuse keys that the family's configuration does not know: it would take them, and nothing would read them."""
    config = make_config(scratch)
    declared = {field.name for field in fields(config)} | config.attribute_map.keys()
    known = declared | vars(type(config)()).keys() | set(dir(type(config))) | _UNDECLARED
    for key in scratch.config:
        taken = key in vars(config)  # not so what older configurations had, such as rope_theta, which is translated
        if taken and key not in known:
            raise MoesaicError(f"model.config.{key}: {scratch.family} has no such key; {suggest(key, declared)}")


def draw(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Draw the weights in fp32 on the CPU, so that they depend on nothing but the seed."""
    torch.manual_seed(seed)
    with makes_a_model(config.model_type):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
