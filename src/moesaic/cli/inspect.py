"""`moesaic inspect`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Device, DryRun, Dtype, Json, Overwrite, Quiet, Seed
from moesaic.cli.output import print_result

NAME = "inspect"
USAGE = "Usage: moesaic inspect CKPT OUT --data DATA... [OPTIONS]"
EXAMPLE = """Examples:
  moesaic inspect ./moe ./looked --data math.jsonl --data code.jsonl
  moesaic inspect ./emo ./looked --data corpus/ --domain-field domain --tokens 1M --against ./baseline
"""


def command(
    checkpoint: Annotated[str, Parameter(name="CKPT", help="The mixture-of-experts model: folder or hub id.")],
    out: Annotated[str, Parameter(name="OUT", help="Folder to write; `moesaic report` reads it.")],
    /,
    *,
    data: Annotated[
        tuple[str, ...],
        Parameter(
            help="Text: a .jsonl, .parquet, .txt or .md file, a folder, or hf://org/name; repeatable.",
            metavar="DATA",
            consume_multiple=True,
            show_default=False,
        ),
    ] = (),
    domain_field: Annotated[
        str | None,
        Parameter(help="Field that names a record's domain [default: domain if there is one, else the file's name]."),
    ] = None,
    tokens: Annotated[str, Parameter(help="At most so many tokens, of documents drawn by the seed.")] = "1M",
    against: Annotated[
        str | None, Parameter(help="A second model with the same tokenizer, for the same documents.", metavar="CKPT2")
    ] = None,
    document_tokens: Annotated[int, Parameter(help="First tokens of each document that are used.")] = 100,
    min_length: Annotated[int, Parameter(help="Leave out documents with fewer tokens.")] = 32,
    max_length: Annotated[int, Parameter(help="Leave out documents with more tokens.")] = 2048,
    clusters: Annotated[int, Parameter(help="Number of token clusters.")] = 32,
    batch_size: Annotated[int, Parameter(help="Documents at once; more is faster and needs more memory.")] = 16,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run an MoE model on text and show what its routers do: load, domains, token clusters, experts.

    Everything is computed from one pass; the numbers are in OUT, a summary is printed.
    """
    from moesaic.analysis.inspect import inspect, prepare
    from moesaic.analysis.recipe import InspectRecipe

    recipe = InspectRecipe(
        checkpoint=checkpoint,
        data=data,
        domain_field=domain_field,
        tokens=tokens,
        against=against,
        document_tokens=document_tokens,
        min_length=min_length,
        max_length=max_length,
        clusters=clusters,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    if dry_run:
        prepared = prepare(recipe, Path(out), overwrite=overwrite, quiet=quiet)
        print_result(() if quiet else prepared.lines, prepared.to_dict(), as_json=json)
        return
    inspection = inspect.run(recipe, out, overwrite=overwrite, quiet=quiet)
    from moesaic.analysis.summary import summarise, terminal_lines

    lines = () if quiet or json else terminal_lines(inspection)
    print_result([*lines, *(() if quiet else (f"written to {out}",))], summarise(inspection), as_json=json)
