"""`moesaic generate`."""

import sys
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Device, Dtype, Json, Quiet, Seed
from moesaic.cli.output import print_json

NAME = "generate"
USAGE = 'Usage: moesaic generate CHECKPOINT "PROMPT" [OPTIONS]'
EXAMPLE = """Example:
  moesaic generate ./moe "The capital of France is" --max-new-tokens 20
"""


def command(
    checkpoint: Annotated[str, Parameter(help="Folder, or hub id org/name[@revision].")],
    prompt: Annotated[str, Parameter(help="The text to continue, as it is (no chat template is applied).")],
    /,
    *,
    max_new_tokens: Annotated[int, Parameter(help="Most tokens to add.")] = 64,
    temperature: Annotated[
        float, Parameter(help="0 takes the likeliest token every time; higher values draw at random.")
    ] = 0.0,
    selection: Annotated[
        str | None, Parameter(help="Use only the experts that this file of `moesaic select` keeps.")
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue a text with a model, dense or mixture of experts: a look at what it can do.

    With --quiet only the added text is printed, without the prompt.
    """
    from moesaic.generation import generate

    live = sys.stdout.isatty() and not json and not quiet
    text = generate(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        device=device,
        dtype=dtype,
        seed=seed,
        stream=live,
        selection=selection,
    )
    if json:
        print_json({"prompt": prompt, "text": text})
    elif not live:
        print(text if quiet else prompt + text)
