"""What `moesaic report` is asked for. Free of torch and numpy."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReportRecipe:
    """What to report on."""

    inputs: tuple[str, ...]
    """Folders of `moesaic inspect` and `moesaic train`, results of `moesaic eval`, in the order of the page."""
    title: str | None = None
    """Title of the page. Default: the names of its inputs."""
