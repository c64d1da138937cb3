"""Build, grow and take apart Mixture-of-Experts language models.

The verbs of the command line are functions here: `upcycle`, `train`, `expand`, `select`, `extract`, `merge_back`,
`evaluate` (the verb `eval`), `compare`, `inspect`, `report`, `verify`, `plan`, `generate`; `load` and
`load_tokenizer` give a model and its tokenizer, `restrict` lets it use some of its experts only, `held_out_loss`
measures it on packed documents; `RoutingCallback` is for transformers' Trainer. Importing this package imports neither
torch nor transformers; they come with the first call that needs them. Further modules that are public: docs/code.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

from moesaic.common.errors import MoesaicError
from moesaic.modeling import register as _register

if TYPE_CHECKING:
    from moesaic.analysis.inspect import inspect
    from moesaic.comparison.compare import compare
    from moesaic.evaluation.evaluate import evaluate
    from moesaic.expansion.run import expand
    from moesaic.exporting.run import export
    from moesaic.generation import generate
    from moesaic.loading import load, load_tokenizer
    from moesaic.planning.run import plan
    from moesaic.reporting.report import report
    from moesaic.routing.restrict import restrict
    from moesaic.selection.extract import extract
    from moesaic.selection.merge import merge_back
    from moesaic.selection.select import select
    from moesaic.trainer import RoutingCallback
    from moesaic.training.run import train
    from moesaic.training.step import held_out_loss
    from moesaic.upcycling.run import upcycle
    from moesaic.verifying.run import verify

__all__ = [
    "MoesaicError",
    "RoutingCallback",
    "__version__",
    "compare",
    "evaluate",
    "expand",
    "export",
    "extract",
    "generate",
    "held_out_loss",
    "inspect",
    "load",
    "load_tokenizer",
    "merge_back",
    "plan",
    "report",
    "restrict",
    "select",
    "train",
    "upcycle",
    "verify",
]

__version__ = "0.1.0"

# Name -> module that has it. No module of the package has the name of a function here: importing it would replace the
# function (so the implementation of `upcycle` is in `upcycling`, and so on).
_FUNCTIONS = {
    "RoutingCallback": "moesaic.trainer",
    "compare": "moesaic.comparison.compare",
    "evaluate": "moesaic.evaluation.evaluate",
    "expand": "moesaic.expansion.run",
    "export": "moesaic.exporting.run",
    "extract": "moesaic.selection.extract",
    "generate": "moesaic.generation",
    "held_out_loss": "moesaic.training.step",
    "inspect": "moesaic.analysis.inspect",
    "load": "moesaic.loading",
    "load_tokenizer": "moesaic.loading",
    "merge_back": "moesaic.selection.merge",
    "plan": "moesaic.planning.run",
    "report": "moesaic.reporting.report",
    "restrict": "moesaic.routing.restrict",
    "select": "moesaic.selection.select",
    "train": "moesaic.training.run",
    "upcycle": "moesaic.upcycling.run",
    "verify": "moesaic.verifying.run",
}

# `AutoModelForCausalLM.from_pretrained(folder)` works after `import moesaic`, which imports neither torch nor
# transformers.
_register()


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
