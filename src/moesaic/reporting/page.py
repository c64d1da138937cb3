"""The file itself: data packed so that it can never become markup, in one page with style, scripts and Plotly.

Numbers travel as compressed arrays and everything as JSON; the page's policy lets nothing run but its own scripts.
"""

import base64
import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic import __version__
from moesaic.common.errors import MoesaicError

_TYPES = {"uint8": "u1", "uint16": "u2", "int32": "i4", "float32": "f4"}
_MARKUP = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}

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


def pack(values: NDArray[Any], *, scale: float = 1.0) -> dict[str, Any]:
    """An array as the page's `unpack` reads it: little-endian numbers, deflated, in base64.

    The page multiplies by `scale`, so that shares can travel as 8 or 16 bits (`quantise`).
    """
    array = np.ascontiguousarray(values)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    data = base64.b64encode(zlib.compress(array.tobytes(), 6)).decode("ascii")
    return {"type": _TYPES[values.dtype.name], "shape": list(array.shape), "scale": scale, "data": data}


def quantise(values: NDArray[Any], *, bits: int = 8) -> dict[str, Any]:
    """Non-negative numbers as `bits` (8 or 16) of their largest: half a step off at most, NaN becomes 0."""
    numbers = np.nan_to_num(np.asarray(values, dtype=np.float64))
    steps = 2**bits - 1
    largest = float(numbers.max(initial=0.0)) or 1.0
    kind = np.uint8 if bits == 8 else np.uint16
    return pack(np.rint(numbers / largest * steps).astype(kind), scale=largest / steps)


def indices(values: NDArray[Any]) -> dict[str, Any]:
    """Non-negative integers below 65536, in as few bytes as they need."""
    return pack(np.asarray(values).astype(np.uint8 if np.max(values, initial=0) < 256 else np.uint16))


def embed(value: Any) -> str:
    """JSON for a script block: ASCII only, and without `<`, `>` and `&`, so that no text in it can end the block.

    ASCII covers U+2028 and U+2029 (line ends in scripts) and halves of surrogate pairs (broken Unicode). NaN and
    infinities become null.
    """
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda found: _MARKUP[found[0]], text)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        return _finite(value.tolist())
    if isinstance(value, np.generic):
        return _finite(value.item())
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


def fold(value: Any) -> dict[str, str]:
    """A large value as JSON, deflated, in base64: the page reads it when a view needs it."""
    return {"json": base64.b64encode(zlib.compress(embed(value).encode("ascii"), 6)).decode("ascii")}


def size(value: Any) -> int:
    """Bytes that a value takes in the page."""
    return len(embed(value))
