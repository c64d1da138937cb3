"""What holds for every test: no network, one thread, fixed seeds, and shape checks of annotated tensors."""

import os
import signal
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub reads it at import
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import jaxtyping
import pytest

import moesaic

# Under `nohup` it is ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The shapes that jaxtyping annotations state are checked while tests run, in every module that has some. Left out is
# `modeling_moesaic.py`, which is remote code that must run without jaxtyping.
_ROOT = Path(moesaic.__file__).parent
_WITH_SHAPES = [
    ".".join(("moesaic", *file.relative_to(_ROOT).with_suffix("").parts))
    for file in sorted(_ROOT.rglob("*.py"))
    if "from jaxtyping import" in file.read_text(encoding="utf-8") and file.name != "modeling_moesaic.py"
]
# Not the plain dotted name: jaxtyping imports only its first part, and pytest makes a module `tests` of its own.
jaxtyping.install_import_hook(_WITH_SHAPES, "importlib.import_module('tests.shape_checks').check_shapes")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """One thread and one seed, so that a test's numbers do not depend on the machine's load or on other tests."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
