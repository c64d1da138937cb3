"""What programs beside moesaic build on, as `moesaic_lab` does: names that stay where they are, whatever moves inside.

The verbs themselves are functions of `moesaic`; `moesaic.common` (errors, recipes, intervals, progress, seeds) is public
as well. A name is imported, with all that it needs, when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

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
