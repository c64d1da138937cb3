"""What verbs do with a recipe that goes beyond calling their function and printing what its result says."""

import os
import sys
from pathlib import Path

from moesaic.cli.build import Call, show
from moesaic.cli.output import print_json, print_lines, print_result
from moesaic.common.fold import room


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
    hub = {key: call.run[key] for key in ("push_to_hub", "public")}
    if call.run["dry_run"]:
        from moesaic.checkpoint.push import check_push
        from moesaic.training.folder import refuse_content, refuse_overlap, require_local_files
        from moesaic.training.planning import plan_train

        refuse_overlap(out, recipe)
        refuse_content(out, resume=resume, overwrite=overwrite)
        require_local_files(recipe)
        check_push(**hub)
        plan = plan_train(recipe, subject=call.config or "recipe")
        from moesaic.training.start import check_dry  # with torch, so after what can be refused without

        check_dry(recipe)
        return show(call, plan)
    from moesaic.training.run import train

    result = train(recipe, out, resume=resume, overwrite=overwrite, quiet=call.quiet, **hub)
    return show(call, result) if os.environ.get("RANK", "0") == "0" else 0


def inspect(call: Call) -> int:
    """Say what would be done, or do it and print a summary for this terminal."""
    from moesaic.analysis.inspect import inspect, prepare

    out, overwrite, quiet = str(call.out), call.run["overwrite"], call.quiet
    if call.run["dry_run"]:
        return show(call, prepare(call.recipe, Path(out), overwrite=overwrite, quiet=quiet))
    inspection = inspect.run(call.recipe, out, overwrite=overwrite, quiet=quiet)
    from moesaic.analysis.summary import summarise, terminal_lines

    last = f"written to {out}; to see all of it: moesaic report {out} report.html"
    lines = () if quiet or call.json else (*terminal_lines(inspection), last)
    print_result(lines, summarise(inspection), as_json=call.json)
    return 0


def compare(call: Call) -> int:
    """Print the tables in a format; on a terminal the best of a column is bold, and wide ones are folded."""
    from moesaic.comparison.compare import compare

    found = compare.run(call.recipe)
    bold = sys.stdout.isatty() and not call.json
    lines = found.lines(call.further.get("format", "table"), bold=bold, room=room())
    print_result(lines, found.to_dict(), as_json=call.json)
    return 0
