"""Everything drawn at random as the base's architecture would (`--shared-weights reinit`)."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from moesaic.upcycling.layout import UpcyclePlan
from moesaic.upcycling.randomness import generator, normal_blocks
from moesaic.upcycling.streams import stream_key


def fresh_blocks(plan: UpcyclePlan, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield first values of one output tensor, by blocks: (number of the first element, float32 values).

    Matrices are N(0, initializer_range), vectors (norms, biases) what the base's own class starts them with.
    """
    (shape,) = (tensor.shape for tensor in plan.files.tensors if tensor.name == name)
    if len(shape) > 1:
        stream = generator(plan.layer.seed, "reinit", name)
        yield from normal_blocks(math.prod(shape), plan.layer.expert.initializer_range, stream)
    else:
        yield 0, _vector(plan, name, shape)


def _vector(plan: UpcyclePlan, name: str, shape: tuple[int, ...]) -> Tensor:
    """A norm's first value is 1 or, where the class adds 1 itself, 0: only the class knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if name.endswith(".bias"):
        return torch.zeros(shape)
    config = AutoConfig.for_model(**plan.base.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    module = model.get_submodule(name.rpartition(".")[0])
    assert all(parameter.ndim == 1 for parameter in module.parameters()), name
    module.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_key(plan.layer.seed, "reinit", name) % 2**63)
        model._init_weights(module)
    return module.get_parameter(name.rpartition(".")[2]).detach().float()
