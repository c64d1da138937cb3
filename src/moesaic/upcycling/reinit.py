"""Everything drawn at random as the base's architecture would (`--shared-weights reinit`)."""

import copy
import functools
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.randomness import generator, normal_blocks
from moesaic.upcycling.streams import stream_key

_ONE_AT_A_TIME = threading.Lock()
"""Classes draw from torch's global generator, and jobs run in threads."""


def fresh_blocks(plan: UpcyclePlan, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield first values of one output tensor, by blocks: (number of the first element, float32 values).

    Weights of linear maps and embeddings are N(0, initializer_range), all else (norms, biases, the parameters of an
    attention itself) what the base's own class starts it with.
    """
    (shape,) = (tensor.shape for tensor in plan.files.tensors if tensor.name == name)
    own = class_value(plan.base.config, name, stream_key(plan.layer.seed, "reinit", name))
    if own is not None:
        yield 0, own.flatten()
    elif len(shape) > 1:
        stream = generator(plan.layer.seed, "reinit", name)
        yield from normal_blocks(math.prod(shape), plan.layer.expert.initializer_range, stream)
    else:
        yield 0, torch.zeros(shape)  # the bias of a shared expert


def class_value(config: dict[str, Any], name: str, key: int) -> Tensor | None:
    """The value that a base's class starts a parameter with, in float32 and with its shape.

    Args:
        config: the base's config.json, of its text part.
        name: the parameter's name in the base.
        key: 64 bits that seed what is drawn.

    Returns:
        None for the weight of a linear map or an embedding, and for what the class does not have.
    """
    parent, _, attribute = name.rpartition(".")
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        model = _meta_model(json.dumps(config, sort_keys=True))
        try:
            module, stored = model.get_submodule(parent), model.get_parameter(name)
        except AttributeError:
            return None
        if isinstance(module, nn.Linear | nn.Embedding) and attribute == "weight":
            return None
        module = copy.deepcopy(module)
        # Only this parameter has memory. A norm starts at 1 or, where the class adds 1 itself, at 0: the class knows.
        module.register_parameter(attribute, nn.Parameter(torch.full(stored.shape, torch.nan, dtype=torch.float32)))
        torch.manual_seed(key % 2**63)
        model._init_weights(module)
    value = module.get_parameter(attribute).detach()
    assert not value.isnan().any(), f"the class of {name} does not say what it starts with"
    return value


@functools.lru_cache(maxsize=1)
def _meta_model(config: str) -> Any:
    """The base's class without memory for its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config)))
