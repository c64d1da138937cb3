"""`moesaic generate`."""

import sys
from typing import Annotated, Any

from cyclopts import Parameter

from moesaic.cli.options import BatchSize, Device, Dtype, Json, Quiet, Seed
from moesaic.cli.output import print_json, print_lines

NAME = "generate"
USAGE = 'Usage: moesaic generate CHECKPOINT "PROMPT"... [OPTIONS]'
EXAMPLE = """Examples:
  moesaic generate ./moe "The capital of France is" --max-new-tokens 20
  moesaic generate ./moe "Once upon a time" "def main():" --batch-size 2 --json
"""


def command(
    checkpoint: Annotated[str, Parameter(help="Folder, or hub id org/name[@revision].")],
    prompt: Annotated[
        str, Parameter(help="A text to continue, as it is (no chat template is applied); several may be given.")
    ],
    /,
    *more_prompts: Annotated[str, Parameter(show=False)],
    max_new_tokens: Annotated[int, Parameter(help="Most tokens to add.")] = 64,
    temperature: Annotated[
        float, Parameter(help="0 takes the likeliest token every time; higher values draw at random.")
    ] = 0.0,
    selection: Annotated[
        str | None, Parameter(help="Use only the experts that this file of `moesaic select` keeps.")
    ] = None,
    batch_size: BatchSize = 1,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Continue texts with a model, dense or mixture of experts: a look at what it can do.

    With --quiet only the added text is printed, without the prompt.
    """
    from moesaic.generation import generate

    prompts = [prompt, *more_prompts]
    live = sys.stdout.isatty() and not json and not quiet and not more_prompts
    texts = generate(
        checkpoint,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        stream=live,
        selection=selection,
    )
    results: list[dict[str, Any]] = [
        {"prompt": given, "text": text} for given, text in zip(prompts, texts, strict=True)
    ]
    if json:
        print_json({"results": results} if more_prompts else results[0])
    elif not live:
        print_lines(result["text"] if quiet else result["prompt"] + result["text"] for result in results)
