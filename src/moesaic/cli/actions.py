"""What verbs do with a recipe that goes beyond calling their function and printing what its result says."""

import os
import sys
from pathlib import Path

from moesaic.cli.build import Call, show
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


def train(call: Call) -> int:
    """Plan a run or do it; of several ranks the first one prints."""
    recipe, out = call.recipe, Path(str(call.out))
    resume, overwrite = call.further.get("resume", False), call.run["overwrite"]
    if call.run["dry_run"]:
        from moesaic.training.folder import refuse_content, refuse_overlap
        from moesaic.training.local_files import require_local_files
        from moesaic.training.planning import plan_train

        refuse_overlap(out, recipe)
        refuse_content(out, resume=resume, overwrite=overwrite)
        require_local_files(recipe)
        return show(call, plan_train(recipe, subject=call.config or "recipe"))
    from moesaic.training.run import train

    result = train(recipe, out, resume=resume, overwrite=overwrite, quiet=call.quiet)
    return show(call, result) if os.environ.get("RANK", "0") == "0" else 0
