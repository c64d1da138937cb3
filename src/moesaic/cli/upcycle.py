"""`moesaic upcycle`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from cyclopts import Parameter

from moesaic.cli.options import DryRun, Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.errors import MoesaicError
from moesaic.common.recipe import load_recipe
from moesaic.common.workers import check_workers
from moesaic.upcycling import recipe as fields

NAME = "upcycle"
USAGE = """Usage: moesaic upcycle BASE OUT --method METHOD [OPTIONS]
       moesaic upcycle --config RECIPE.yaml OUT [OPTIONS]"""
EXAMPLE = """Examples:
  moesaic upcycle ./base ./moe --method virtual_group --experts 8 --shards 2
  moesaic upcycle Qwen/Qwen3-1.7B-Base ./moe --method divmoe --shards 2 \\
          --specialist math=./math --specialist code=./code
"""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keys of an upcycling recipe as options; what is not given comes from the recipe or its default."""

    method: Annotated[fields.MethodName | None, Parameter(help="How experts are made; needed without --config.")] = None
    specialist: Annotated[
        tuple[str, ...],
        Parameter(
            help="A specialist of btx or divmoe, once for each: a short name and a folder or hub id.",
            metavar="NAME=PATH",
            show_default=False,
        ),
    ] = ()
    experts: Annotated[
        int | None,
        Parameter(help="Routed experts per layer [default: 8; btx and divmoe: specialists times shards]."),
    ] = None
    shards: Annotated[
        int | None,
        Parameter(help="Parts that each FFN is cut into [default: 2 for virtual_group and divmoe, else 1]."),
    ] = None
    top_k: Annotated[
        int | None, Parameter(help="Experts that each token uses [default: 2, or the number of shards if larger].")
    ] = None
    shared_experts: Annotated[
        int | None, Parameter(help="Copies of the base's whole FFN that every token uses as well [default: 0].")
    ] = None
    routing: Annotated[
        fields.RoutingRule | None,
        Parameter(help="Which experts may be chosen together [default: one_per_group for divmoe, else topk]."),
    ] = None
    weighting: Annotated[
        fields.Weighting | None,
        Parameter(help="Softmax over the selected experts, or over all without renormalisation [default: selected]."),
    ] = None
    router_init: Annotated[
        fields.RouterInit | None,
        Parameter(help="First router rows; auto keeps the strongest statement about the result [default: auto]."),
    ] = None
    router_std: Annotated[float | None, Parameter(help="Standard deviation of random router rows [default: 0.02].")] = (
        None
    )
    scale: Annotated[
        fields.Scale | None,
        Parameter(help="Factor on expert weights: exact (down_proj only), DivMoE's equation 5, none [default: exact]."),
    ] = None
    shared_weights: Annotated[
        fields.SharedWeights | None,
        Parameter(help="Weights outside the experts [default: mean for btx and divmoe, else base]."),
    ] = None
    drop_ratio: Annotated[
        float | None, Parameter(help="Share of each expert's neurons that drop draws again, 0 to 1 [default: 0.5].")
    ] = None
    drop_indices: Annotated[
        fields.DropIndices | None,
        Parameter(help="One set of dropped neurons per expert, or one per matrix [default: per-expert]."),
    ] = None
    layers: Annotated[
        str | None,
        Parameter(
            help="Layers that become MoE, counted from 0: all, every:2, 1-10,12 [default: all].", metavar="LAYERS"
        ),
    ] = None
    dtype: Annotated[
        fields.DtypeName | None, Parameter(help="Data type of the result; auto is the base's [default: auto].")
    ] = None
    shard_size: Annotated[
        str | None,
        Parameter(help="Largest weight file: 500MB, 5GB, 2GiB, or a number of bytes [default: 5GB].", metavar="SIZE"),
    ] = None
    seed: Annotated[int | None, Parameter(help="Seed of every random number [default: 0].")] = None
    allow_nonfinite: Annotated[
        bool | None, Parameter(help="Accept NaN and Inf in the sources [default: refuse them].", show_default=False)
    ] = None


def command(
    base: Annotated[
        str | None,
        Parameter(help="Dense checkpoint: folder, or hub id org/name[@revision]. May be left out with --config."),
    ] = None,
    out: Annotated[Path | None, Parameter(help="Folder to write.", show_default=False)] = None,
    /,
    *,
    config: Annotated[
        Path | None,
        Parameter(
            help="Upcycling recipe (see `moesaic recipes list`); the options below win over it.", metavar="RECIPE"
        ),
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
    """Turn a dense checkpoint, or a base and its specialists, into a mixture-of-experts checkpoint."""
    flags = _flags(settings)
    if config is not None and out is None and base is not None:
        base, out = None, Path(base)  # a single folder is OUT
    if base is not None and not base.strip():
        raise MoesaicError("BASE: is empty; give a folder or a hub id (org/name)")
    if base is not None:
        flags["base"] = base
    if out is None or (config is None and base is None):
        raise MoesaicError("BASE and OUT are both needed; with --config RECIPE.yaml, OUT alone")
    if config is None and settings.method is None:
        raise MoesaicError(f"--method is needed: one of {', '.join(get_args(fields.MethodName))}")
    recipe = load_recipe(fields.UpcycleRecipe, {} if config is None else config, flags=flags)
    threads = check_workers(workers)

    from moesaic.upcycling.run import upcycle  # brings torch: after everything that can be refused without

    result = upcycle(recipe, out, overwrite=overwrite, dry_run=dry_run, quiet=quiet, workers=threads)
    print_result(() if quiet else result.lines, result.summary, as_json=json)


def _flags(settings: Settings) -> dict[str, Any]:
    """Return what was given on the command line, by recipe key."""
    given = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    specialists = given.pop("specialist")
    given = {key: value for key, value in given.items() if value is not None}
    if specialists:
        given["specialists"] = _specialists(specialists)
    return given


def _specialists(texts: tuple[str, ...]) -> list[dict[str, str]]:
    given: dict[str, dict[str, str]] = {}
    for text in texts:
        specialist = _specialist(text)
        name = specialist["name"]
        if name in given:
            raise MoesaicError(f"--specialist {text}: the name {name!r} is given twice; use a different one for each")
        given[name] = specialist
    return list(given.values())


def _specialist(text: str) -> dict[str, str]:
    name, equals, path = text.partition("=")
    if not equals and Path(text).is_dir():
        name = Path(text).name
        raise MoesaicError(f"--specialist {text}: has no name; write --specialist {name}={text}")
    if not (name.strip() and equals and path.strip()):
        raise MoesaicError(f"--specialist {text}: expected NAME=PATH, such as math=./specialists/math")
    return {
        "name": name.strip(),
        "path": str(Path(path.strip()).expanduser()) if path.startswith("~") else path.strip(),
    }
