"""`moesaic verify`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moesaic.cli.options import Device, Dtype, Json, Quiet
from moesaic.cli.output import print_result

NAME = "verify"
USAGE = "Usage: moesaic verify SOURCE TARGET [OPTIONS]"
EXAMPLE = """Example:
  moesaic verify ./base ./moe --text notes.txt --dtype float32
"""
CHECK_FAILED = 1


def command(
    source: Annotated[str, Parameter(help="The dense base that TARGET was made from: folder or hub id.")],
    target: Annotated[str, Parameter(help="The mixture-of-experts checkpoint that upcycle wrote.")],
    /,
    *,
    text: Annotated[
        Path | None,
        Parameter(
            help="UTF-8 text to measure logits and perplexity on [default: docstrings of Python's own library].",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    batch_size: Annotated[int, Parameter(help="Sequences that run at once.")] = 1,
    dtype: Dtype = "float32",
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Say what an upcycled or expanded checkpoint preserves: the statement that applies and its measured error.

    Exit status 1 if the statement does not hold.
    """
    from moesaic.verifying.run import verify

    report = verify(source, target, text=text, device=device, batch_size=batch_size, dtype=dtype, quiet=quiet)
    print_result(report.lines(), report.to_dict(), as_json=json)
    return 0 if report.ok else CHECK_FAILED
