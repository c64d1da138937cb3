"""What verbs do with a recipe that goes beyond calling their function and printing what its result says."""

import sys

from moesaic.cli.build import Call
from moesaic.cli.output import print_json, print_lines


def generate(call: Call) -> int:
    """Print prompts with their texts; a single one on a terminal while it is made."""
    from moesaic.generation import generate

    prompts = call.recipe.prompt
    alone = len(prompts) == 1
    live = sys.stdout.isatty() and not call.json and not call.quiet and alone
    texts = generate.run(call.recipe, stream=live)
    results = [{"prompt": given, "text": text} for given, text in zip(prompts, texts, strict=True)]
    if call.json:
        print_json(results[0] if alone else {"results": results})
    elif not live:
        print_lines(one["text"] if call.quiet else one["prompt"] + one["text"] for one in results)
    return 0
