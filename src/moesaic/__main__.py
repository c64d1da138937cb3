"""`python -m moesaic`."""

import os
import sys

from moesaic.cli.app import run


def main() -> None:
    """Run the command line with this process's arguments and exit with its status."""
    arguments = sys.argv[1:]
    # Read by transformers and huggingface_hub when they are imported. Their advice is for programmers, and their bars
    # fill a log file.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Read by torch when it is imported: large tensors on huge pages where the kernel allows it (madvise), which makes
    # the first touch of their memory several times cheaper. Elsewhere it does nothing.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "--quiet" in arguments or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(run(arguments))


if __name__ == "__main__":
    main()
