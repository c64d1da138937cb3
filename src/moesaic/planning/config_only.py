"""A model of which only config.json is here, as a checkpoint of headers: shapes from our tables or from the family's
class in transformers on the meta device, sizes on disk by how the config says that its weights are quantised.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import TensorInfo, tensor_bytes
from moesaic.checkpoint.quantised import scheme_of, settings_of, without_settings
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.families.config_values import refuse_giant
from moesaic.families.counting import config_shapes
from moesaic.families.dense_table import FAMILIES
from moesaic.families.family import our_base
from moesaic.families.moe import PREDICTION_KEYS
from moesaic.families.shrink import EXPERT_KEYS

MOST_PARAMETERS = 10**15
"""A thousand times the largest model that was published."""

_SAME_CLASS: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "deepseek_v32": "deepseek_v3"}
"""Types whose model is that of another one, for counting: DeepSeek-V3.2's indexer is not counted."""

_DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def open_config(file: Path) -> Checkpoint:
    """The checkpoint that a config.json describes; no tensor of it can be read.

    Raises:
        MoesaicError: no such file, a type that is unknown, sizes that no machine holds.
    """
    if not file.is_file():
        raise MoesaicError(f"{file}: no such file; give a config.json, a checkpoint folder or a recipe")
    content = load_json(file)
    settings, config = settings_of(content), without_settings(content)
    _refuse_giant(config, str(file))
    model_type = config.get("model_type")
    if model_type in FAMILIES or our_base(model_type):
        shapes = config_shapes(config, str(file))
    else:
        shapes, config = _class_shapes(config, str(file))
    dtype = _DTYPES.get(str(content.get("dtype") or content.get("torch_dtype")), "BF16")
    infos = {name: _info(file, name, dtype, shape, tensor_bytes(dtype, shape)) for name, shape in shapes.items()}
    stored = None
    if settings is not None:
        sizes = scheme_of(settings, str(file)).sizes
        packed = {name: sizes(name, shape, settings) for name, shape in shapes.items()}
        stored = {
            name: info if packed[name] is None else _info(file, name, "U8", info.shape, math.ceil(packed[name] or 0))
            for name, info in infos.items()
        }
    return Checkpoint(path=file.parent, name=str(file), revision=None, config=config, tensors=infos, stored=stored)


def _info(file: Path, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> TensorInfo:
    absent = file.parent / "not here"
    return TensorInfo(name=name, dtype=dtype, shape=shape, file=absent, offset=0, nbytes=nbytes)


def _refuse_giant(config: Mapping[str, Any], name: str) -> None:
    """By arithmetic, before anything is built."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        refuse_giant(part, name)

        def most(*keys: str, part: Mapping[str, Any] = part) -> int:
            return max((value for key in keys if isinstance(value := part.get(key), int)), default=1)

        width = most("moe_intermediate_size") if "moe_intermediate_size" in part else most("intermediate_size")
        layer = most("hidden_size") * max(width * most(*EXPERT_KEYS), most("hidden_size"))
        total = most("num_hidden_layers") * layer + most("vocab_size") * most("hidden_size")
        if total > MOST_PARAMETERS:
            raise MoesaicError(f"{name}: makes more than {total:.0e} parameters, which no machine holds; correct it")


def _class_shapes(config: Mapping[str, Any], name: str) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Shapes by name, and the text config with all defaults of the class."""
    from transformers import AutoConfig

    from moesaic.loading import explained_errors, refuse_unknown_architecture
    from moesaic.training.planning import class_shapes

    own = str(config.get("model_type"))
    known = {**config, "model_type": _SAME_CLASS.get(own, config.get("model_type"))}
    refuse_unknown_architecture(known, name)
    values = {key: value for key, value in known.items() if key not in ("auto_map", "architectures", "dtype")}
    with explained_errors(f"{name}: transformers cannot use a value in it"):
        made = AutoConfig.for_model(**values)
        shapes, full = class_shapes(made)
    # What the class has where nothing is said is its own.
    told = {key: config.get(key) or 0 for key in PREDICTION_KEYS if key in full or key in config}
    return shapes, {**full, **told, "model_type": own}
