"""The verbs whose flags are made from a recipe class, one entry each; `build` says how."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

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


WRITES = ("workers", "overwrite", "dry_run", "push_to_hub", "public")
"""What every verb that writes a checkpoint from others is told about a run."""

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
        run_options=WRITES,
        missing={
            "arguments": "BASE and OUT are both needed; with --config RECIPE.yaml, OUT alone",
            "method": "--method is needed: one of {choices}",
        },
        options={
            "base": Option(read=_not_empty),
            "specialists": Option(flag="--specialist", metavar="NAME=PATH", type=tuple[str, ...], read=_specialists),
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
        run_options=WRITES,
        missing={
            "arguments": "CKPT and OUT are both needed; with --config RECIPE.yaml, OUT alone",
            "experts": "--experts is needed: the number of routed experts per layer of the result",
        },
        options={"checkpoint": Option(metavar="CKPT"), "utility_from": Option(metavar="FILE")},
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
    ),
    "select": Command(
        about="""Score the experts of a mixture-of-experts model on calibration text and choose the ones to keep.

        The model is read from disk one layer at a time, so it may be larger than memory.""",
        usage="""moesaic select CHECKPOINT OUT.json --data CALIB --keep 32|25% [OPTIONS]
        moesaic select --union A.json B.json OUT.json
        moesaic select --compare A.json B.json""",
        examples="""
  moesaic select ./moe math.json --data math.jsonl --keep 25% --examples 5
  moesaic select ./moe gsm.json --task gsm8k --shots 5 --data-dir ./evals --keep 25%
  moesaic select ./moe both.json --data math.jsonl --data code.jsonl --keep 32
  moesaic select ./moe both.json --stats math.stats.json --stats code.stats.json --keep 32
  moesaic select ./moe mmlu --data mmlu.jsonl --by mmlu_category --split 0.4 --shots 5 --keep 25%""",
        recipe="moesaic.selection.recipe:SelectRecipe",
        run="moesaic.selection.select:select",
        arguments=("checkpoint", "out"),
        words=("CHECKPOINT OUT", "Folder or hub id, and the JSON file to write (with --by: a folder)."),
        options={
            "data": Option(metavar="DATA"),
            "task": Option(metavar="TASK"),
            "stats": Option(metavar="FILE"),
            "only": Option(hidden=True),
        },
        further={
            "by": (str, "Make one selection for each value of this field, or mmlu_category."),
            "union": (bool, "Write the union of two selections."),
            "compare": (bool, "Say how far two selections agree."),
        },
        missing={
            "arguments": "select: expected CHECKPOINT OUT, got {count} paths",
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
        run_options=WRITES,
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
        run_options=WRITES,
        options={"parts": Option(flag="--with", metavar="PARTS", type=str, read=_with_commas)},
    ),
    "eval": Command(
        about="Measure a checkpoint, dense or MoE, on benchmarks (through lm-eval) and on held-out text.",
        usage="""moesaic eval CHECKPOINT --out results.json [--suite NAME|FILE] [--data-dir DIR] [OPTIONS]
        moesaic eval CHECKPOINT --out results.json --task NAME|FILE... [OPTIONS]
        moesaic eval --list""",
        examples="""
  moesaic eval ./moe --suite emo-mc9 --data-dir ./evals --out moe.results.json
  moesaic eval ./moe --suite arc_easy,piqa --shots 0 --limit 200 --data-dir ./evals --out quick.json
  moesaic eval ./moe --suite perplexity --data-dir ./corpus --out text.json
  moesaic eval ./moe --suite mmlu-categories --selection ./selections --data-dir ./evals --out subset.json
  moesaic eval ./moe --task mine.yaml --out mine.json --samples mine.jsonl
  moesaic eval --list

Suites: divmoe15, divmoe8, emo-mc9, emo-gen5, mmlu-categories, mmlu-pro, gsm8k, perplexity.""",
        recipe="moesaic.evaluation.recipe:EvalRecipe",
        run="moesaic.evaluation.evaluate:evaluate",
        arguments=("checkpoint",),
        run_options=("overwrite", "dry_run"),
        options={
            "overwrite": Option(help="Begin the results file anew."),
            "task": Option(metavar="TASK"),
            "samples": Option(metavar="FILE"),
        },
        further={
            "out": (str, "Results file; a second call goes on where the first one stopped."),
            "list": (bool, "List suites and tasks, and the files and fields that they look for."),
        },
        before="moesaic.cli.listings:of_tasks",
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
        run_options=WRITES[1:],
        options={
            "config": Option(
                metavar="RECIPE", help="Training recipe: a YAML file, or a name from `moesaic recipes list`."
            ),
            "trackers": Option(metavar="NAME"),
            "out": Option(help="Folder of the checkpoint, the metrics and the run state."),
            "overwrite": Option(help="Remove the run or checkpoint in OUT first."),
            "dry_run": Option(help="Check the recipe and say what the run would need, but train nothing."),
        },
        further={"resume": (bool, "Go on with the run in OUT; start fresh where there is nothing to resume.")},
        action="moesaic.cli.actions:train",
    ),
    "export": Command(
        about="""Write the same model in another family, layout, dtype or file format, for engines that do not know
        ours.

        A family is written only where it computes exactly the model; otherwise every rule that fails is named. Exit
        status 1 if --check finds a difference that is more than rounding.""",
        usage="moesaic export CHECKPOINT OUT [--to FAMILY] [OPTIONS]",
        examples="""
  moesaic export ./moe ./native --check
  moesaic export ./moe ./native --to mixtral --layout fused --dtype float32
  moesaic export allenai/Emo_1b14b_1T ./emo --to moesaic
  moesaic export ./moe ./gguf --to gguf --llama-cpp ./llama.cpp""",
        recipe="moesaic.exporting.recipe:ExportRecipe",
        run="moesaic.exporting.run:export",
        arguments=("checkpoint", "out"),
        run_options=WRITES,
        options={"to": Option(metavar="FAMILY"), "layout": Option(type=str)},
        further={
            "check": (bool, "Run both models on random and real tokens and compare the logits, in fp32."),
            "text": (str, "UTF-8 text for --check. Default: docstrings of Python's own library."),
            "device": (str, "Where --check runs, such as cpu or cuda:1. Default: cuda if there is one, else cpu."),
            "llama_cpp": (str, "Folder of llama.cpp, for --to gguf. Default: $MOESAIC_LLAMA_CPP."),
        },
    ),
    "compare": Command(
        about="Put results of evaluations and training runs side by side, with intervals.",
        usage="moesaic compare [NAME=]RUN... [--baseline NAME] [--format table|md|csv|json]",
        examples="""
  moesaic compare emo.results.json standard.results.json --baseline standard
  moesaic compare emo=runs/emo-s0 emo=runs/emo-s1 standard=runs/std-s0 standard=runs/std-s1
  moesaic compare E=runs/e up=runs/up mE=runs/me --gap-closure E up mE --format md""",
        recipe="moesaic.comparison.recipe:CompareRecipe",
        run="moesaic.comparison.compare:compare",
        arguments=("runs",),
        options={
            "runs": Option(metavar="RUN"),
            "gap": Option(flag="--gap-closure", metavar="SMALL UPCYCLED LARGE"),
        },
        further={"format": (Literal["table", "md", "csv", "json"], "How the tables are written. Default: table.")},
        missing={"arguments": "compare: give at least one results file or training run"},
        action="moesaic.cli.actions:compare",
    ),
    "inspect": Command(
        about="""Run an MoE model on text and show what its routers do: load, domains, token clusters, experts.

        Everything is computed from one pass; the numbers are in OUT, a summary is printed.""",
        usage="moesaic inspect CKPT OUT --data DATA... [OPTIONS]",
        examples="""
  moesaic inspect ./moe ./looked --data math.jsonl --data code.jsonl
  moesaic inspect ./emo ./looked --data corpus/ --domain-field domain --tokens 1M --against ./baseline""",
        recipe="moesaic.analysis.recipe:InspectRecipe",
        run="moesaic.analysis.inspect:inspect",
        arguments=("checkpoint", "out"),
        run_options=("overwrite", "dry_run"),
        options={
            "checkpoint": Option(metavar="CKPT"),
            "out": Option(help="Folder to write; `moesaic report` reads it."),
            "data": Option(metavar="DATA", several=True),
            "against": Option(metavar="CKPT2"),
            "dtype": Option(type=Literal["auto", "float32", "bfloat16", "float16"]),
        },
        action="moesaic.cli.actions:inspect",
    ),
    "report": Command(
        about="""Write one self-contained HTML file: verdicts, expert load, domains, clusters, texts, learning curves,
        results.

        It needs no network and no server: open it in a browser, send it to somebody, keep it with the run.""",
        usage="moesaic report RUN_OR_INSPECT... OUT.html [OPTIONS]",
        examples="""
  moesaic report ./inspected report.html
  moesaic report ./emo-inspected ./baseline-inspected ./emo ./baseline results.json report.html""",
        recipe="moesaic.reporting.recipe:ReportRecipe",
        run="moesaic.reporting.report:report",
        arguments=("inputs", "out"),
        words=(
            "RUN_OR_INSPECT OUT",
            "Folders of `moesaic inspect` and `moesaic train`, results of `moesaic eval`; last the file to write.",
        ),
        run_options=("overwrite",),
        missing={"arguments": "report: expected RUN_OR_INSPECT... OUT.html, got {count} paths"},
    ),
    "verify": Command(
        about="""Say what an upcycled or expanded checkpoint preserves: the statement that applies and its measured
        error.

        Exit status 1 if the statement does not hold.""",
        usage="moesaic verify SOURCE TARGET [OPTIONS]",
        examples="""
  moesaic verify ./base ./moe --text notes.txt --dtype float32""",
        recipe="moesaic.verifying.recipe:VerifyRecipe",
        run="moesaic.verifying.run:verify",
        arguments=("source", "target"),
        options={"text": Option(metavar="FILE")},
        result_when_quiet=True,
    ),
    "plan": Command(
        about="""Say what a checkpoint is, or what a recipe would make and cost, from headers alone.

        Total and active parameters (with and without embeddings), bytes, FLOPs per token, peak memory, disk, download
        size and expected minutes, and the devices that serving takes. Reads no weights; of a config.json alone too.""",
        usage="moesaic plan RECIPE|CHECKPOINT|config.json [OPTIONS]",
        examples="""
  moesaic plan ./moe
  moesaic plan ./config.json --gpu H200 --context 32768
  moesaic plan recipe.yaml --json""",
        recipe="moesaic.planning.recipe:PlanRecipe",
        run="moesaic.planning.run:plan",
        arguments=("source",),
        options={"source": Option(metavar="RECIPE|CHECKPOINT")},
        result_when_quiet=True,
    ),
}
