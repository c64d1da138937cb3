"""How experts are chosen, as plain data: imports nothing heavy, so that the command line can."""

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["router", "easy_ep", "reap", "frequency", "random"]
EasyEpVariant = Literal["original", "emo"]

METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class SelectRequest:
    """How to choose."""

    keep: str | int
    """Experts per layer: a number, or a share such as 25%."""
    method: Method = "router"
    easy_ep_variant: EasyEpVariant = "original"
    layerwise: bool = False
    """Score each layer with the layers before it already cut."""
    top_k: int | None = None
    """Active experts of the result, where fewer than the model's are kept."""
    domain: str | None = None
    """Name of the calibration data; None: from the file's name."""
    max_tokens: int = 2048
    """Of a text, its first tokens."""
    batch_size: int = 8
    """Texts at once."""
