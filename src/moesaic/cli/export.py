"""`moesaic export`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Device, DryRun, Json, Overwrite, Quiet
from moesaic.cli.output import print_result
from moesaic.common.workers import check_workers
from moesaic.exporting.recipe import DtypeName

NAME = "export"
USAGE = "Usage: moesaic export CHECKPOINT OUT [--to FAMILY] [OPTIONS]"
EXAMPLE = """Examples:
  moesaic export ./moe ./native --check
  moesaic export ./moe ./native --to mixtral --layout fused --dtype float32
  moesaic export allenai/Emo_1b14b_1T ./emo --to moesaic
  moesaic export ./moe ./gguf --to gguf --llama-cpp ./llama.cpp
"""
CHECK_FAILED = 1


def command(
    checkpoint: Annotated[str, Parameter(help="A mixture of experts: folder, or hub id org/name[@revision].")],
    out: Annotated[str, Parameter(help="Folder to write.")],
    /,
    *,
    to: Annotated[
        str,
        Parameter(
            help="auto (the family itself, else the best one that is exactly the model), moesaic (our architecture), "
            "mixtral, qwen3_moe, qwen2_moe, olmoe, flex_olmo, granitemoeshared, or gguf.",
            metavar="FAMILY",
        ),
    ] = "auto",
    layout: Annotated[
        str,
        Parameter(
            help="How experts are stored: family (as on the hub), input (as in CHECKPOINT), per-expert or fused.",
            metavar="LAYOUT",
        ),
    ] = "family",
    dtype: Annotated[DtypeName | None, Parameter(help="Of all weights [default: the checkpoint's].")] = None,
    check: Annotated[
        bool, Parameter(help="Run both models on random and real tokens and compare the logits, in fp32.")
    ] = False,
    text: Annotated[
        Path | None,
        Parameter(help="UTF-8 text for --check [default: docstrings of Python's own library].", metavar="FILE"),
    ] = None,
    device: Device = None,
    llama_cpp: Annotated[
        Path | None,
        Parameter(help="Folder of llama.cpp, for --to gguf [default: $MOESAIC_LLAMA_CPP].", metavar="FOLDER"),
    ] = None,
    shard_size: Annotated[str, Parameter(help="Largest size of a weight file.")] = "5GB",
    allow_nonfinite: Annotated[bool, Parameter(help="Accept NaN and infinity in the weights.")] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    workers: Annotated[int | None, Parameter(help="Threads [default: one per core, at most 8].")] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Write the same model in another family, layout, dtype or file format, for engines that do not know ours.

    A family is written only where it computes exactly the model; otherwise every rule that fails is named. Exit status
    1 if --check finds a difference that is more than rounding.
    """
    from moesaic.exporting.run import export

    result = export(
        checkpoint,
        out,
        to=to,
        layout=layout,
        dtype=dtype,
        check=check,
        text=text,
        device=device,
        llama_cpp=llama_cpp,
        overwrite=overwrite,
        dry_run=dry_run,
        quiet=quiet,
        workers=check_workers(workers),
        shard_size=shard_size,
        allow_nonfinite=allow_nonfinite,
    )
    print_result(() if quiet else result.lines(), result.to_dict(), as_json=json)
    return 0 if result.ok else CHECK_FAILED
