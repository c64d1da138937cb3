"""Options of the commands that are no verb of a recipe class, with their help."""

from typing import Annotated

from cyclopts import Parameter

Json = Annotated[bool, Parameter(help="Print one JSON document on stdout, errors included.")]
Quiet = Annotated[bool, Parameter(help="Print no progress, notices or summary; errors are always printed.")]
DryRun = Annotated[bool, Parameter(help="Check everything and say what would be written, but write nothing.")]
