"""Options that several verbs share, with their help."""

from typing import Annotated, Literal

from cyclopts import Parameter

Json = Annotated[bool, Parameter(help="Print one JSON document on stdout, errors included.")]
Quiet = Annotated[bool, Parameter(help="Print no progress, notices or summary; errors are always printed.")]
Overwrite = Annotated[
    bool, Parameter(help="Replace OUT if it exists; the old one stays until the new one is complete.")
]
DryRun = Annotated[bool, Parameter(help="Check everything and say what would be written, but write nothing.")]
Device = Annotated[
    str | None,
    Parameter(
        help="Where the model runs, such as cpu, cuda or cuda:1 [default: cuda if there is one, else cpu].",
        metavar="DEVICE",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    Parameter(help="Data type that the model runs in; auto is the checkpoint's."),
]
BatchSize = Annotated[int, Parameter(help="Prompts that the model continues at once.")]
Seed = Annotated[int, Parameter(help="Seed of every random number.")]
