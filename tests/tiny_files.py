"""Tiny safetensors files and checkpoint folders written byte by byte, valid or damaged on purpose."""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.common.errors import MoesaicError


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    """A file from a header (JSON text, bytes or an object to dump) and the bytes after it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A valid file by the safetensors library's own writer, the independent reference."""
    from safetensors.torch import save_file

    save_file({name: tensor.clone() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def checkpoint_folder(
    folder: Path,
    shards: Mapping[str, Mapping[str, Tensor]] | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    weight_map: Mapping[str, str] | None = None,
) -> Path:
    """A checkpoint folder; one shard `model.safetensors` needs no index, several get one (or the one given)."""
    shards = {"model.safetensors": {"w": torch.arange(6.0).reshape(2, 3)}} if shards is None else shards
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    for file, tensors in shards.items():
        write_tensors(folder / file, tensors)
    if weight_map is None and list(shards) != ["model.safetensors"]:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    if weight_map is not None:
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def fork(action: Callable[[], str]) -> tuple[int, int]:
    """Run in a forked child (no torch in there): (process, pipe with the result or the error's text)."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks when there are threads
        process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    try:
        message = action()
    except MoesaicError as error:
        message = str(error)
    except BaseException as error:
        message = repr(error)
    os.write(writing, message.encode())
    os._exit(0)


def result_of(child: tuple[int, int]) -> str:
    """Wait for a child of `fork`."""
    process, reading = child
    with os.fdopen(reading, "rb") as stream:
        message = stream.read().decode()
    os.waitpid(process, 0)
    return message


def in_child(action: Callable[[], None]) -> str:
    """The text of the error that `action` raises in a child process, "" without one."""
    return result_of(fork(lambda: action() or ""))
