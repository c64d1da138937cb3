"""What `moesaic compare` is asked for. Free of torch and numpy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompareRecipe:
    """What to compare."""

    runs: tuple[str, ...]
    """Results file or folder of a training run, as NAME=PATH or PATH; seeds share a name."""
    baseline: str | None = None
    """Name of the run that differences are to."""
    gap: tuple[str, str, str] | None = None
    """Names of the small, the upcycled and the large model."""
