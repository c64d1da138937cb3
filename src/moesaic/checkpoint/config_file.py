"""config.json as every verb writes it: what the source said, rope in the spellings of transformers 4 and 5. Torch-free.

transformers 5 says rope in `rope_parameters`, transformers 4 in `rope_theta`, `rope_scaling` and Gemma-3's
`rope_local_base_freq`. Each takes its family's default, without a word, for what it does not find; so both are written.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.common.files import explained

CONFIG_FILE = "config.json"
OLDEST_TRANSFORMERS = "5.24"
"""What the code of our architecture needs; pyproject.toml says the same."""

ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq")

_BY_KIND_OF_LAYER_IN_4 = tuple(
    prefix + base for prefix in ("", "moesaic_") for base in ("gemma3_text", "gemma3n_text", "olmo3")
)
"""The causal families of transformers 4 whose layers differ in rope, and ours on them. Its last version is out: these
are all. Families that came with 5 have no older spelling, and stumble over its keys."""

_MADE_ANEW = (
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "model_type",
)  # fmt: skip
"""What a result says for itself, whatever its source said."""


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json."""
    path = folder / CONFIG_FILE
    text = json.dumps(both_ropes(config), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with explained(path):
        path.write_text(text, encoding="utf-8")


def both_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config, rope said in both spellings; what is there stays as it is, and no default is made up."""
    made = dict(config)
    if isinstance(inner := made.get("text_config"), Mapping):
        made["text_config"] = both_ropes(inner)
    if not made.get("rope_parameters") and made.get("rope_theta") is None:
        return made
    parameters = made.get("rope_parameters") or rope_parameters(made)
    if _by_kind_of_layer(parameters) and str(made.get("model_type")) not in _BY_KIND_OF_LAYER_IN_4:
        return made
    return {**_older_spelling(parameters), **made, "rope_parameters": parameters}


def _by_kind_of_layer(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope in the spelling of transformers 5: one dict, or (Gemma-3) one for each kind of layer."""
    if (found := config.get("rope_parameters")) is not None:
        return dict(found)
    scaling = dict(config.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    parameters = scaling | ({"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {})
    if config.get("rope_local_base_freq") is None:
        return parameters
    local = {"rope_type": "default", "rope_theta": config["rope_local_base_freq"]}
    return {"full_attention": parameters, "sliding_attention": local}


def _older_spelling(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as keys of transformers 4."""
    if isinstance(full := parameters.get("full_attention"), Mapping):
        local = parameters.get("sliding_attention")
        theta = local.get("rope_theta") if isinstance(local, Mapping) else None
        return _older_spelling(full) | ({} if theta is None else {"rope_local_base_freq": theta})
    made: dict[str, Any] = {}
    if parameters.get("rope_theta") is not None:
        made["rope_theta"] = parameters["rope_theta"]
    if parameters.get("partial_rotary_factor") is not None:
        made["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    default = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    return made | {"rope_scaling": None if default else scaling}


def with_source_keys(config: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """A config that transformers made, and the source's keys that it left out, such as those of older spellings."""
    lost = {key: value for key, value in source.items() if key not in config and key not in _MADE_ANEW}
    return {**lost, **config}
