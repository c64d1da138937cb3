"""Loading checkpoints, dense or MoE, as transformers models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moesaic.checkpoint.headers import VOCABULARY_FILES, load_json
from moesaic.checkpoint.record import read_provenance, side_files
from moesaic.checkpoint.source import open_checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import warn
from moesaic.families.counting import beyond_depth, layer_of
from moesaic.families.moe import prediction_notices
from moesaic.families.moe_table import way_out
from moesaic.routing.install import reinstall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.distributed.configuration_utils import DistributedConfig

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
    with _explained(checkpoint.path / "config.json", LookupError, ArithmeticError, AssertionError):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=number_type,
            trust_remote_code=False,
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
    if unused := sorted(key for key in keys if not beyond_depth(checkpoint.config, layer_of(key))):
        warn(f"{path}: the model does not use {_some(unused)}")
    if _is_untied_by_the_file(model):
        warn(f"{path}: config.json ties the output head to the embedding, but the file has a head that differs from it")
    model = model if distributed is not None else model.to(place)
    if routing := (read_provenance(checkpoint.path) or {}).get("routing"):
        reinstall(model, routing)
    return model.eval()


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a checkpoint; a `MoesaicError` says when there is none."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(path)
    if hint := way_out(model_type := checkpoint.config.get("model_type")):
        raise MoesaicError(f"{path}: model_type {model_type!r} in config.json is unknown to transformers{hint}")
    if not side_files(checkpoint, VOCABULARY_FILES):  # transformers would make an empty one for some families
        raise MoesaicError(f"{path}: has no usable tokenizer (no vocabulary file); copy the base's tokenizer files")
    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, StrictDataclassError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise MoesaicError(f"{path}: has no usable tokenizer ({reason}); copy the base's tokenizer files") from error


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
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = folder / "config.json"
    refuse_unknown_architecture(load_json(file), name)
    kinds = (StrictDataclassError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
    with _explained(file, *kinds):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


@contextmanager
def _explained(config: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn what transformers raises for a bad value in a config.json into a MoesaicError that names the file."""
    try:
        yield
    except kinds as error:
        reason = " ".join(str(error).split())
        raise MoesaicError(
            f"{config}: transformers cannot use a value in it ({type(error).__name__}: {reason}); correct it"
        ) from error


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
