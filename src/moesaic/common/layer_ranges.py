"""The text of `--layers`: which layers of a model are MoE. No torch."""

import re

from moesaic.common.errors import MoesaicError

_HELP = "write all, every:2 (layers i with i+1 divisible by 2) or zero-based numbers and ranges such as 1-10,12"


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the zero-based indices of the layers that become MoE, ascending.

    Raises:
        MoesaicError: the text can't be read, or names a layer that the base does not have, or none at all.
    """
    stripped = text.replace(" ", "")
    every = re.fullmatch(r"every:(\d+)", stripped)
    if stripped == "all":
        chosen = set(range(num_layers))
    elif every:
        step = int(every[1])
        if step == 0:
            raise MoesaicError(f"--layers {text}: the step must be at least 1")
        chosen = {index for index in range(num_layers) if (index + 1) % step == 0}
    else:
        chosen = {index for part in stripped.split(",") for index in _range(part, text)}
    beyond = sorted(index for index in chosen if index >= num_layers)
    if beyond:
        raise MoesaicError(
            f"--layers {text}: the base has no layer {beyond[0]}; its {num_layers} layers are 0 to {num_layers - 1}"
        )
    if not chosen:
        raise MoesaicError(f"--layers {text}: no layer would become MoE, the base has only {num_layers}")
    return tuple(sorted(chosen))


def _range(part: str, text: str) -> range:
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, flags=re.ASCII)
    if match is None:
        raise MoesaicError(f"--layers {text}: cannot read {part!r}; {_HELP}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise MoesaicError(f"--layers {text}: the range {part} runs backwards; write {last}-{first}")
    return range(first, last + 1)
