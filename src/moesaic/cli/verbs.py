"""The verbs whose flags are made from a recipe class, one entry each; `build` says how."""

from collections.abc import Callable
from pathlib import Path

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
}
