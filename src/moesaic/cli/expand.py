"""`moesaic expand`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from moesaic.cli.options import DryRun, Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.workers import check_workers
from moesaic.expansion import recipe as fields
from moesaic.expansion.allocation import Allocation

NAME = "expand"
USAGE = """Usage: moesaic expand CKPT OUT --experts N [OPTIONS]
       moesaic expand --config RECIPE.yaml OUT [OPTIONS]"""
EXAMPLE = """Examples:
  moesaic expand ./moe ./larger --experts 64 --calibration texts.jsonl
  moesaic expand ./moe ./larger --experts 48 --routing one_per_copy_group
  moesaic expand ./moe ./larger --experts 64 --utility-from ./earlier/utility.json
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of an expansion recipe as options; what is not given comes from the recipe or its default."""

    experts: Annotated[
        int | None, Parameter(help="Routed experts per layer of the result, any number; needed without --config.")
    ] = None
    utility: Annotated[
        fields.UtilityName | None,
        Parameter(help="What decides the copies [default: gradient_norm with --calibration, else uniform]."),
    ] = None
    utility_from: Annotated[
        str | None, Parameter(help="A utility.json that an earlier run left in its OUT.", metavar="FILE")
    ] = None
    calibration: Annotated[
        tuple[str, ...],
        Parameter(
            help="Text for gradients: a .txt, .jsonl or .parquet file, a folder, or hf://org/name; repeatable.",
            metavar="DATA",
            show_default=False,
        ),
    ] = ()
    utility_batches: Annotated[int | None, Parameter(help="Batches that are averaged over [default: 10].")] = None
    batch_size: Annotated[int | None, Parameter(help="Sequences per calibration batch [default: 8].")] = None
    sequence_length: Annotated[int | None, Parameter(help="Tokens per calibration sequence [default: 512].")] = None
    allocation: Annotated[
        Allocation | None,
        Parameter(help="The best experts to their cap first, by share, or drawn by share [default: greedy]."),
    ] = None
    cap: Annotated[int | None, Parameter(help="Most copies added of one expert [default: 3].")] = None
    routing: Annotated[
        fields.Routing | None,
        Parameter(
            help="The family's top-k, or at most one of an expert's copies per token, which changes nothing at first "
            "[default: plain]."
        ),
    ] = None
    top_k: Annotated[int | None, Parameter(help="Experts that each token uses [default: as before].")] = None
    expert_op: Annotated[
        fields.ExpertOp | None, Parameter(help="What a duplicate's weights start from [default: copy].")
    ] = None
    router_op: Annotated[
        fields.RouterOp | None, Parameter(help="What a duplicate's router row starts from [default: copy].")
    ] = None
    delta: Annotated[
        float | None,
        Parameter(help="Noise that tells copies apart, on the selection bias or on router rows [default: 1e-3]."),
    ] = None
    shard_size: Annotated[
        str | None,
        Parameter(help="Largest weight file: 500MB, 5GB, 2GiB, or a number of bytes [default: 5GB].", metavar="SIZE"),
    ] = None
    seed: Annotated[int | None, Parameter(help="Seed of every random number [default: 0].")] = None
    allow_nonfinite: Annotated[
        bool | None, Parameter(help="Accept NaN and Inf in the checkpoint [default: refuse them].", show_default=False)
    ] = None


def command(
    checkpoint: Annotated[
        str | None,
        Parameter(help="MoE checkpoint: folder, or hub id org/name[@revision]. May be left out with --config."),
    ] = None,
    out: Annotated[Path | None, Parameter(help="Folder to write.", show_default=False)] = None,
    /,
    *,
    config: Annotated[
        Path | None, Parameter(help="Expansion recipe; the options below win over it.", metavar="RECIPE")
    ] = None,
    settings: Settings = Settings(),
    workers: Annotated[
        int | None, Parameter(help="Threads; the result does not depend on it [default: one per core, at most 8].")
    ] = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Grow the experts of a mixture-of-experts checkpoint: more of them, as copies of those it has."""
    flags = _flags(settings)
    if config is not None and out is None and checkpoint is not None:
        checkpoint, out = None, Path(checkpoint)  # a single folder is OUT
    if checkpoint is not None:
        flags["checkpoint"] = checkpoint
    if out is None or (config is None and checkpoint is None):
        raise MoesaicError("CKPT and OUT are both needed; with --config RECIPE.yaml, OUT alone")
    if config is None and settings.experts is None:
        raise MoesaicError("--experts is needed: the number of routed experts per layer of the result")
    recipe = load_recipe(fields.ExpandRecipe, {} if config is None else config, flags=flags)
    threads = check_workers(workers)

    from moesaic.expansion.run import expand  # brings torch: after everything that can be refused without

    result = expand(recipe, out, overwrite=overwrite, dry_run=dry_run, quiet=quiet, workers=threads)
    print_result(() if quiet else result.lines, result.summary, as_json=json)


def _flags(settings: Settings) -> dict[str, Any]:
    """Return what was given on the command line, by recipe key."""
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return {key: value for key, value in given.items() if value is not None and value != ()}
