"""Loading checkpoints, dense or MoE, as transformers models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from moesaic.checkpoint.headers import VOCABULARY_FILES
from moesaic.checkpoint.lazy import stored
from moesaic.checkpoint.quantised import KEYS
from moesaic.checkpoint.record import read_provenance, side_files
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json
from moesaic.common.progress import no_library_bars, warn
from moesaic.common.recipe import load_document
from moesaic.families.config_values import TOKEN_KINDS, check_fits, check_values, refuse_giant
from moesaic.families.counting import predicts
from moesaic.families.moe import prediction_notices
from moesaic.families.moe_table import way_out
from moesaic.routing.install import reinstall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.distributed.configuration_utils import DistributedConfig

_REASON = 300
"""Characters of a library's own words in a message."""

_NOT_TAKEN = "transformers cannot use a value in it"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    distributed: "DistributedConfig | None" = None,
) -> "PreTrainedModel":
    """Load a causal language model, dense or MoE, in evaluation mode.

    A routing rule that training recorded in the checkpoint's moesaic.json is installed again. Tensors that the model
    has no use for are named in a warning.

    Args:
        path: folder, or hub id `org/name[@revision]`.
        device: such as `cpu` or `cuda:1`. Default: cuda if there is one, else cpu.
        dtype: float32, bfloat16, float16 or auto. Default: auto, the checkpoint's own.
        distributed: how the ranks of this process group share the model; each reads its own shards.

    Raises:
        MoesaicError: the checkpoint, device or dtype cannot be used, or weights that the model needs are not there
            (they would be random). No remote code runs.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = open_checkpoint(path)
    place, number_type = pick_device(device), pick_dtype(dtype)
    config = load_config(checkpoint.path, str(path))
    # A mismatch of shapes would be an error of many lines; what was not loaded is looked at below instead.
    text = config.get_text_config().to_dict()
    check_fits(text, checkpoint.tensors, f"{path}: config.json")
    load_generation_config(checkpoint.path)
    for line in checkpoint.dequantised:
        warn(line)
    with explained_errors(f"{checkpoint.path / 'config.json'}: {_NOT_TAKEN}"), no_library_bars():
        source: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.path, "trust_remote_code": False}
        if checkpoint.stored is not None:
            made = {name: stored(info).read() for name, info in checkpoint.tensors.items()}
            source = {"pretrained_model_name_or_path": None, "state_dict": made}
        loaded: Any = (AutoModelForCausalLM if checkpoint.stored is None else _class_of(config)).from_pretrained(
            **source,
            config=config,
            dtype=number_type,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            local_files_only=True,
            distributed_config=distributed,
        )
    model, loading = loaded
    for kind, what in (
        ("missing_keys", "has no tensor for"),
        ("mismatched_keys", "has a tensor of another shape for"),
    ):
        if names := sorted(map(_first, loading[kind])):
            raise MoesaicError(f"{path}: {what} {_some(names)}; the file is incomplete or its config.json is another's")
    for line in prediction_notices(checkpoint, "it is not loaded"):
        warn(line)
    keys = map(_first, loading["unexpected_keys"])
    if unused := sorted(key for key in keys if not predicts(checkpoint.config, key)):
        warn(f"{path}: the model does not use {_some(unused)}")
    if _is_untied_by_the_file(model):
        warn(f"{path}: config.json ties the output head to the embedding, but the file has a head that differs from it")
    model = model if distributed is not None else model.to(place)
    if routing := (read_provenance(checkpoint.path) or {}).get("routing"):
        reinstall(model, routing)
    return model.eval()


@dataclass(frozen=True, kw_only=True)
class _TokenizerConfig:
    """What transformers takes from tokenizer_config.json as it is, and only fails on when there is text."""

    model_max_length: float | None = None
    padding_side: Literal["left", "right"] = "right"
    truncation_side: Literal["left", "right"] = "right"
    clean_up_tokenization_spaces: bool | None = None


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint; a `MoesaicError` says when there is none."""
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(path)
    if hint := way_out(model_type := checkpoint.config.get("model_type")):
        raise MoesaicError(f"{path}: model_type {model_type!r} in config.json is unknown to transformers{hint}")
    if not side_files(checkpoint, VOCABULARY_FILES):  # transformers would make an empty one for some families
        raise MoesaicError(f"{path}: has no usable tokenizer (no vocabulary file); copy the base's tokenizer files")
    if (file := checkpoint.path / "tokenizer_config.json").exists():
        load_document(_TokenizerConfig, load_json(file), str(file), others=True, way_out="copy the base's")
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers package raises bare ones
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise MoesaicError(f"{path}: has no usable tokenizer ({reason}); copy the base's tokenizer files") from error


def _class_of(config: Any) -> Any:
    """The class of a causal language model; the automatic one takes no tensors without a folder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device to run on, cuda by default if there is one; refuse one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise MoesaicError(f"--device {device}: not a device; use cpu, cuda or cuda:INDEX") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise MoesaicError(f"--device {device}: this machine has {torch.cuda.device_count()} CUDA devices; use cpu")
    return place


def pick_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    """Return the torch dtype for its name; `auto` (also for None) is the checkpoint's own."""
    if dtype is None or dtype == "auto":
        return "auto"
    if isinstance(dtype, str) and dtype not in _DTYPES:
        raise MoesaicError(f"--dtype {dtype}: not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype] if isinstance(dtype, str) else dtype


def load_config(folder: Path, name: str) -> Any:
    """The transformers configuration of a folder. No remote code runs.

    Raises:
        MoesaicError: a type that is unknown, a value that its class does not take.
    """
    from transformers import AutoConfig

    file = folder / "config.json"
    values = load_json(file)
    refuse_unknown_architecture(values, name)
    for part in (values, values.get("text_config")):
        if isinstance(part, dict):
            refuse_giant(part, str(file))
    with explained_errors(f"{file}: {_NOT_TAKEN}"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        for key in KEYS:  # of a quantised checkpoint the weights are read as numbers
            vars(part).pop(key, None)
    return config


def load_generation_config(folder: Path) -> Any:
    """The `GenerationConfig` of a folder; None where it has none.

    Raises:
        MoesaicError: a value that transformers does not take.
    """
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.exists():
        return None
    check_values(load_json(file), str(file), kinds=TOKEN_KINDS)
    with explained_errors(f"{file}: {_NOT_TAKEN}"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


@contextmanager
def explained_errors(what: str) -> Iterator[None]:
    """Turn what transformers raises for a value that others wrote into a MoesaicError of one line, which begins `what`.

    All kinds of errors: its classes check little, and fail with whatever their arithmetic or a package that is not
    installed says.
    """
    try:
        yield
    except (MoesaicError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        reason = reason if len(reason) <= _REASON else f"{reason[: _REASON - 3]}..."
        raise MoesaicError(f"{what} ({type(error).__name__}: {reason}); correct it") from error


def refuse_unknown_architecture(config: dict[str, Any], name: str) -> None:
    """Raise MoesaicError where transformers has no causal language model for a configuration."""
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise MoesaicError(
            f"{name}: model_type {model_type!r} in config.json is unknown to transformers {__version__}"
            f"{way_out(model_type)}"
        )
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise MoesaicError(f"{name}: model_type {model_type!r} is not a causal language model")


def _is_untied_by_the_file(model: Any) -> bool:
    """Whether the config wants one matrix for embedding and head and transformers loaded two."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return bool(tied and head is not None and head.weight is not embedding.weight)


def _first(key: Any) -> str:
    return key if isinstance(key, str) else key[0]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
