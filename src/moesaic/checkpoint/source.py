"""Opening a source checkpoint: a folder or a hub id, checked from the headers alone. Torch-free."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moesaic.checkpoint.headers import (
    INDEX_FILE,
    SINGLE_FILE,
    TensorInfo,
    collect,
    no_weights,
    read_header,
    shard_names,
)
from moesaic.checkpoint.quantised import WAY_OUT, decoded, scheme_of, settings_of, without_settings
from moesaic.common.errors import MoesaicError
from moesaic.common.files import load_json

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[^@\s]+))?")

_QUANTISED_DTYPES = frozenset({"U8", "I8", "F4"})
_QUANTISED_PREFIXES = ("F8_", "F6_")
_QUANTISED_SUFFIXES = (".qweight", ".weight_packed", ".weight_scale_inv")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose headers have been read and checked.

    `path` is the folder (for a hub id the snapshot in the hub's cache), `name` what the user wrote, `revision` the
    commit of a hub snapshot (None for a folder), `config` the parsed config.json. `download_bytes` is 0 unless it comes
    from `open_headers` and its weights are not on this machine: then it is their size, and no tensor can be read.

    Of a quantised checkpoint `tensors` and `config` are those of the same model in bf16, whose numbers are made when
    they are read, and `stored` are the tensors in the files; or (`as_stored`) they are what is in the files, and
    `packed` is their ending after the name of the tensor that they stand for.
    """

    path: Path
    name: str
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    download_bytes: int = 0
    stored: Mapping[str, TensorInfo] | None = None
    packed: Mapping[str, str] = field(default_factory=dict)

    @property
    def dequantised(self) -> tuple[str, ...]:
        """One sentence where the numbers are made of quantised ones."""
        if self.stored is None or self.packed:
            return ()
        return (f"{self.name}: is quantised; its weights are dequantised and read as bf16",)


def open_checkpoint(ref: str | Path, *, as_stored: bool = False) -> Checkpoint:
    """Open a folder or a hub id `org/name[@revision]` (downloaded through huggingface_hub where needed).

    Refuses (MoesaicError) whatever can be seen to be unusable from config, index and headers: files that are missing,
    truncated or outside the folder, tensors given twice or missing, pickled weights, repositories that are gated,
    missing or out of reach, and quantised weights of a kind that is not read. Others are dequantised where they are
    read, or (`as_stored`) tensors like others, whose bytes can be moved.
    """
    _refuse_empty(ref)
    if Path(ref).is_dir():
        return _open_folder(Path(ref), name=str(ref), revision=None, as_stored=as_stored)
    repo, revision = _hub_id(ref)
    from moesaic.checkpoint import hub

    folder = hub.download(repo, revision)
    return _open_folder(folder, name=str(ref), revision=folder.name, as_stored=as_stored)


def open_headers(ref: str | Path) -> Checkpoint:
    """The same without downloading weights: of a hub id only config, index and safetensors headers are fetched.

    Where the weights are not in the hub's cache, the checkpoint's `download_bytes` is their size, and the `file` of
    its tensors does not exist.
    """
    _refuse_empty(ref)
    if Path(ref).is_dir():
        return open_checkpoint(ref)
    repo, revision = _hub_id(ref)
    from moesaic.checkpoint import hub

    folder, tensors, missing = hub.fetch_headers(repo, revision)
    config = _read_config(folder)
    checkpoint = Checkpoint(
        path=folder, name=str(ref), revision=folder.name, config=config, tensors=tensors, download_bytes=missing
    )
    return _quantised(checkpoint, as_stored=False)


def _refuse_empty(ref: str | Path) -> None:
    """An empty text would be this folder for `Path`, and no path has a NUL character."""
    if not str(ref).strip() or "\0" in str(ref):
        raise MoesaicError("the name of a checkpoint is empty or has a NUL; give a folder or a hub id (org/name)")


def file_inside(folder: Path, name: str, *, told_by: str) -> Path:
    """The path of file `name` of a checkpoint folder; refuses names and symbolic links that lead out of the folder.

    The links of the hub's cache (`snapshots/<commit>/x -> ../../blobs/<hash>`) are the one exception.
    `told_by` is what named the file, for the message.
    """
    if "\0" in name:
        raise MoesaicError(f"{told_by}: {name!r} is no name of a file: it has a NUL character")
    path = folder / name
    root = folder.resolve()
    real = path.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if Path(name).is_absolute() or ".." in Path(name).parts or not any(real.is_relative_to(r) for r in roots):
        raise MoesaicError(f"{told_by}: {name!r} leads outside the folder {folder}; put the file itself there")
    return path


def _quantised(checkpoint: Checkpoint, *, as_stored: bool) -> Checkpoint:
    """A checkpoint whose headers were read as its quantised weights are to be seen, if it has any."""
    tensors, config, name = checkpoint.tensors, checkpoint.config, checkpoint.name
    if (settings := settings_of(config)) is None:
        _refuse_codes(tensors, name)
        return checkpoint
    scheme = scheme_of(settings, name)
    numbers = decoded(scheme, settings, tensors, name)
    _refuse_codes({key: info for key, info in numbers.items() if info.codes is None}, name)
    if not as_stored:
        return replace(checkpoint, tensors=numbers, config=without_settings(config), stored=tensors)
    owners = ((key, scheme.own_name(key, tensors)) for key in tensors)
    packed = {key: key.removeprefix(own) for key, own in owners if own is not None}
    return replace(checkpoint, stored=tensors, packed=packed)


def _refuse_codes(tensors: Mapping[str, TensorInfo], name: str) -> None:
    """Refuse codes that nothing tells how to read: arithmetic on them would be wrong."""
    for info in tensors.values():
        packed = info.dtype in _QUANTISED_DTYPES or info.dtype.startswith(_QUANTISED_PREFIXES)
        if packed or info.name.endswith(_QUANTISED_SUFFIXES):
            raise MoesaicError(
                f"{name}: is quantised (tensor {info.name!r} is {info.dtype}), and its config.json does not say "
                f"how{WAY_OUT}"
            )


def _hub_id(ref: str | Path) -> tuple[str, str | None]:
    if Path(ref).exists():
        raise MoesaicError(f"{ref}: is a file; give the folder that has config.json and the weights")
    match = _HUB_ID.fullmatch(ref) if isinstance(ref, str) else None
    if match is None:
        raise MoesaicError(f"{ref}: no such folder (and not a hub id, which looks like org/name or org/name@revision)")
    return match["repo"], match["revision"]


def _read_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").exists():
        raise MoesaicError(f"{folder}: has no config.json; give the folder of a transformers checkpoint")
    return load_json(file_inside(folder, "config.json", told_by=str(folder)))


def _open_folder(folder: Path, *, name: str, revision: str | None, as_stored: bool) -> Checkpoint:
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    checkpoint = Checkpoint(path=folder, name=name, revision=revision, config=config, tensors=tensors)
    return _quantised(checkpoint, as_stored=as_stored)


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    # The single file first, as transformers does.
    if (folder / SINGLE_FILE).is_symlink() or (folder / SINGLE_FILE).exists():
        tensors = read_header(file_inside(folder, SINGLE_FILE, told_by=str(folder)))
    elif (folder / INDEX_FILE).exists():
        index_file = file_inside(folder, INDEX_FILE, told_by=str(folder))
        weight_map = shard_names(index_file)
        files = {file: file_inside(folder, file, told_by=str(index_file)) for file in sorted(set(weight_map.values()))}
        for file, path in files.items():
            if not path.is_file():
                raise MoesaicError(f"{index_file}: names {file}, which is not in the folder; fetch it again")
        tensors = collect(index_file, weight_map, {file: read_header(path) for file, path in files.items()})
    else:
        raise no_weights(folder, [path.name for path in folder.iterdir()])
    if not tensors:
        raise MoesaicError(f"{folder}: its weights hold no tensor")
    return tensors
