"""The verbs whose flags are made from a recipe class, one entry each; `build` says how."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.build import Command, Option, build
from moesaic.common.errors import MoesaicError


def __getattr__(name: str) -> Callable[..., int]:
    """The command of a verb; cyclopts asks for it by name, and only when it is called."""
    if name in COMMANDS:
        return build(name, COMMANDS[name])
    raise AttributeError(name)


def _not_empty(base: str) -> str:
    if not base.strip():
        raise MoesaicError("BASE: is empty; give a folder or a hub id (org/name)")
    return base


def _with_commas(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _specialists(texts: tuple[str, ...]) -> list[dict[str, str]]:
    """`--specialist NAME=PATH`, several times."""
    given: dict[str, dict[str, str]] = {}
    for text in texts:
        name, equals, path = (part.strip() for part in text.partition("="))
        if not equals and Path(text).is_dir():
            name = Path(text).name
            raise MoesaicError(f"--specialist {text}: has no name; write --specialist {name}={text}")
        if not (name and equals and path):
            raise MoesaicError(f"--specialist {text}: expected NAME=PATH, such as math=./specialists/math")
        if name in given:
            raise MoesaicError(f"--specialist {text}: the name {name!r} is given twice; use a different one for each")
        given[name] = {"name": name, "path": str(Path(path).expanduser()) if path.startswith("~") else path}
    return list(given.values())


COMMANDS: dict[str, Command] = {
    "upcycle": Command(
        about="Turn a dense checkpoint, or a base and its specialists, into a mixture-of-experts checkpoint.",
        usage="moesaic upcycle BASE OUT --method METHOD [OPTIONS]",
        examples="""
  moesaic upcycle ./base ./moe --method virtual_group --experts 8 --shards 2
  moesaic upcycle Qwen/Qwen3-1.7B-Base ./moe --method divmoe --shards 2 \\
          --specialist math=./math --specialist code=./code""",
        recipe="moesaic.upcycling.recipe:UpcycleRecipe",
        run="moesaic.upcycling.run:upcycle",
        arguments=("base", "out"),
        run_options=("workers", "overwrite", "dry_run"),
        missing={
            "arguments": "BASE and OUT are both needed; with --config RECIPE.yaml, OUT alone",
            "method": "--method is needed: one of scratch, sparse, drop, virtual_group, btx, divmoe",
        },
        options={
            "base": Option(read=_not_empty),
            "specialists": Option(flag="--specialist", metavar="NAME=PATH", type=tuple[str, ...], read=_specialists),
            "layers": Option(metavar="LAYERS"),
            "shard_size": Option(metavar="SIZE"),
        },
    ),
    "expand": Command(
        about="Grow the experts of a mixture-of-experts checkpoint: more of them, as copies of those it has.",
        usage="moesaic expand CKPT OUT --experts N [OPTIONS]",
        examples="""
  moesaic expand ./moe ./larger --experts 64 --calibration texts.jsonl
  moesaic expand ./moe ./larger --experts 48 --routing one_per_copy_group
  moesaic expand ./moe ./larger --experts 64 --utility-from ./earlier/utility.json""",
        recipe="moesaic.expansion.recipe:ExpandRecipe",
        run="moesaic.expansion.run:expand",
        arguments=("checkpoint", "out"),
        run_options=("workers", "overwrite", "dry_run"),
        missing={
            "arguments": "CKPT and OUT are both needed; with --config RECIPE.yaml, OUT alone",
            "experts": "--experts is needed: the number of routed experts per layer of the result",
        },
        options={
            "checkpoint": Option(metavar="CKPT"),
            "utility_from": Option(metavar="FILE"),
            "calibration": Option(metavar="DATA"),
            "shard_size": Option(metavar="SIZE"),
        },
    ),
    "generate": Command(
        about="""Continue texts with a model, dense or mixture of experts: a look at what it can do.

        With --quiet only the added text is printed, without the prompt.""",
        usage='moesaic generate CHECKPOINT "PROMPT"... [OPTIONS]',
        examples="""
  moesaic generate ./moe "The capital of France is" --max-new-tokens 20
  moesaic generate ./moe "Once upon a time" "def main():" --batch-size 2 --json""",
        recipe="moesaic.generation:GenerateRecipe",
        run="moesaic.generation:generate",
        arguments=("checkpoint", "prompt"),
        action="moesaic.cli.actions:generate",
        options={"device": Option(metavar="DEVICE")},
    ),
    "select": Command(
        about="""Score the experts of a mixture-of-experts model on calibration text and choose the ones to keep.

        The model is read from disk one layer at a time, so it may be larger than memory.""",
        usage="""moesaic select CHECKPOINT OUT.json --data CALIB --keep 32|25% [OPTIONS]
        moesaic select --union A.json B.json OUT.json
        moesaic select --compare A.json B.json""",
        examples="""
  moesaic select ./moe math.json --data math.jsonl --keep 25% --examples 5
  moesaic select ./moe both.json --stats math.stats.json --stats code.stats.json --keep 32
  moesaic select ./moe mmlu --data mmlu.jsonl --by mmlu_category --split 0.4 --shots 5 --keep 25%""",
        recipe="moesaic.selection.recipe:SelectRecipe",
        run="moesaic.selection.select:select",
        arguments=("checkpoint", "out"),
        words=("CHECKPOINT OUT", "Folder or hub id, and the JSON file to write (with --by: a folder)."),
        options={"stats": Option(metavar="FILE"), "only": Option(hidden=True)},
        further={
            "by": Annotated[str, Parameter(help="Make one selection for each value of this field, or mmlu_category.")],
            "union": Annotated[bool, Parameter(help="Write the union of two selections.")],
            "compare": Annotated[bool, Parameter(help="Say how far two selections agree.")],
        },
        missing={
            "arguments": "select: expected CHECKPOINT OUT, got {count} paths",
            "keep": "--keep: is needed; give the number of experts to keep in each layer, or a share such as 25%",
        },
        before="moesaic.cli.select:of_selections",
        action="moesaic.cli.select:select_and_print",
    ),
    "extract": Command(
        about="""Write a standalone checkpoint of the same family with only the selected experts.

        Shared experts and everything outside the experts are kept; moesaic.json records the original ids for
        merge-back.""",
        usage="moesaic extract CHECKPOINT SELECTION.json OUT [OPTIONS]",
        examples="""
  moesaic extract ./moe math.json ./math-experts""",
        recipe="moesaic.selection.recipe:ExtractRecipe",
        run="moesaic.selection.extract:extract",
        arguments=("checkpoint", "selection", "out"),
        run_options=("workers", "overwrite", "dry_run"),
    ),
    "merge-back": Command(
        about="""Put the experts of a fine-tuned subset back to their places in the full model.

        Several subsets go back one after the other; experts that two of them hold need --average.""",
        usage="moesaic merge-back FULL SUBSET OUT [OPTIONS]",
        examples="""
  moesaic merge-back ./moe ./math-experts-tuned ./moe-math
  moesaic merge-back ./moe ./math-experts-tuned ./moe-math --with router,shared --average 0.5""",
        recipe="moesaic.selection.recipe:MergeBackRecipe",
        run="moesaic.selection.merge:merge_back",
        arguments=("full", "subset", "out"),
        run_options=("workers", "overwrite", "dry_run"),
        options={"parts": Option(flag="--with", metavar="PARTS", type=str, read=_with_commas)},
    ),
    "eval": Command(
        about="Measure a checkpoint, dense or MoE, on benchmarks (through lm-eval) and on held-out text.",
        usage="moesaic eval CHECKPOINT --out results.json [--suite NAME|FILE] [--data-dir DIR] [OPTIONS]",
        examples="""
  moesaic eval ./moe --suite emo-mc9 --data-dir ./evals --out moe.results.json
  moesaic eval ./moe --suite arc_easy,piqa --shots 0 --limit 200 --data-dir ./evals --out quick.json
  moesaic eval ./moe --suite perplexity --data-dir ./corpus --out text.json
  moesaic eval ./moe --suite mmlu-categories --selection ./selections --data-dir ./evals --out subset.json

Suites: divmoe15, divmoe8, emo-mc9, emo-gen5, mmlu-categories, mmlu-pro, gsm8k, perplexity.""",
        recipe="moesaic.evaluation.recipe:EvalRecipe",
        run="moesaic.evaluation.evaluate:evaluate",
        arguments=("checkpoint",),
        run_options=("overwrite", "dry_run"),
        options={
            "device": Option(metavar="DEVICE"),
            "overwrite": Option(help="Begin the results file anew."),
        },
        further={
            "out": Annotated[str, Parameter(help="Results file; a second call goes on where the first one stopped.")],
        },
        missing={"out": 'Command "eval" parameter --out requires an argument.'},
    ),
    "train": Command(
        about="""Train a dense or mixture-of-experts model: continued, from scratch, annealing or fine-tuning.

        OUT ends as a plain checkpoint; OUT/metrics.jsonl has a line per step and per validation. SIGTERM saves the
        run's state and leaves with status 143. Under torchrun all ranks get the same command.""",
        usage="moesaic train RECIPE OUT [OPTIONS]",
        examples="""
  moesaic train recipe.yaml ./run --set optimizer.lr=1e-3 --set budget.steps=500
  moesaic train recipe.yaml ./run --resume
  torchrun --nproc-per-node 8 -m moesaic train recipe.yaml ./run --set parallel.fsdp=8""",
        recipe="moesaic.training.recipe:TrainRecipe",
        run="moesaic.training.run:train",
        arguments=("config", "out"),
        run_options=("overwrite", "dry_run"),
        options={
            "config": Option(
                metavar="RECIPE", help="Training recipe: a YAML file, or a name from `moesaic recipes list`."
            ),
            "out": Option(help="Folder of the checkpoint, the metrics and the run state."),
            "overwrite": Option(help="Remove the run or checkpoint in OUT first."),
            "dry_run": Option(help="Check the recipe and say what the run would need, but train nothing."),
        },
        further={
            "resume": Annotated[
                bool, Parameter(help="Go on with the run in OUT; start fresh where there is nothing to resume.")
            ],
        },
        action="moesaic.cli.actions:train",
    ),
}
