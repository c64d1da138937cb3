"""What programs beside moesaic build on, as `moesaic_lab` does: names that stay where they are, whatever moves inside.

The verbs themselves are functions of `moesaic`; `moesaic.common` (errors, recipes, intervals, progress, seeds) is public
as well. A name is imported, with all that it needs, when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.analysis.format import read_inspection
    from moesaic.checkpoint.headers import load_json
    from moesaic.checkpoint.pio import check_file, explained, write_file
    from moesaic.data.cache import open_cache
    from moesaic.data.dataset import PackedDataset, ValidationSet, validation_sets
    from moesaic.data.recipe import DataRecipe, SourceRecipe
    from moesaic.data.tokenise import prepare
    from moesaic.expansion.costs import cpt_of_share, saving
    from moesaic.loading import load_tokenizer
    from moesaic.modeling.cross_entropy import IGNORED, ratio_with_error, token_losses
    from moesaic.routing.install import routing_context
    from moesaic.routing.pools import RoutingContext
    from moesaic.routing.rules import RoutingDecision
    from moesaic.routing.subset import Selection, save_selection
    from moesaic.selection.recipe import METHODS
    from moesaic.selection.statistics import load_statistics
    from moesaic.training.metrics import METRICS_FILE
    from moesaic.training.recipe import TrainRecipe
    from moesaic.training.step import add_losses

_MODULES = {
    "analysis.format": ("read_inspection",),
    "checkpoint.headers": ("load_json",),
    "checkpoint.pio": ("check_file", "explained", "write_file"),
    "data.cache": ("open_cache",),
    "data.dataset": ("PackedDataset", "ValidationSet", "validation_sets"),
    "data.recipe": ("DataRecipe", "SourceRecipe"),
    "data.tokenise": ("prepare",),
    "expansion.costs": ("cpt_of_share", "saving"),
    "loading": ("load_tokenizer",),
    "modeling.cross_entropy": ("IGNORED", "ratio_with_error", "token_losses"),
    "routing.install": ("routing_context",),
    "routing.pools": ("RoutingContext",),
    "routing.rules": ("RoutingDecision",),
    "routing.subset": ("Selection", "save_selection"),
    "selection.recipe": ("METHODS", "Method"),
    "selection.statistics": ("load_statistics",),
    "training.metrics": ("METRICS_FILE",),
    "training.recipe": ("TrainRecipe",),
    "training.step": ("add_losses",),
}
_PLACES = {name: f"moesaic.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(_PLACES)
