"""The file itself: a template with style, scripts, data and Plotly, under a policy that lets nothing else run."""

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from moesaic import __version__
from moesaic.common.errors import MoesaicError
from moesaic.reporting.packing import embed

# In the order in which they are put together; the last one starts the page.
_SCRIPTS = (
    "core.js",
    "charts.js",
    "overview.js",
    "load.js",
    "similarity.js",
    "tokens.js",
    "clusters.js",
    "reader.js",
    "experts.js",
    "position.js",
    "training.js",
    "results.js",
    "start.js",
)


def render(payload: Mapping[str, Any], title: str) -> str:
    """The page. Text of the data is in one JSON block; the scripts put it on the page with `textContent` only.

    Plotly's source travels deflated and is run when the first chart is wanted: the page opens without waiting for it.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MoesaicError(
            f"report: {error.name} is not installed; run `pip install 'moesaic[report]'`, then repeat"
        ) from error
    folder = resources.files("moesaic.reporting") / "templates"
    script = _script([(folder / "scripts" / name).read_text(encoding="utf-8") for name in _SCRIPTS])
    plotly = get_plotlyjs()
    environment = Environment(
        loader=PackageLoader("moesaic.reporting"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # Everything marked as safe is our own file, base64, or JSON from `embed`.
    return environment.get_template("page.html").render(
        title=title,
        version=__version__,
        hashes=" ".join(f"'{_hash(text)}'" for text in (script, plotly)),
        style=Markup((folder / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        data=Markup(embed(payload)),
        plotly=base64.b64encode(zlib.compress(plotly.encode(), 9)).decode("ascii"),
    )


def _script(parts: list[str]) -> str:
    """One strict function around all parts, so that no name is global."""
    script = "\n(() => {\n'use strict';\n" + "\n".join(parts) + "\n})();\n"
    assert not re.search(r"</script|<!--|\r", script, re.IGNORECASE), "would end or change the script block"
    return script


def _hash(text: str) -> str:
    """The source as a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
