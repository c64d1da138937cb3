"""Checkpoints on the Hugging Face hub, through huggingface_hub: only the files needed, and errors that say what to do.

Torch-free; imported only when a hub id is opened.
"""

import glob
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import DryRunFileInfo, HfApi, constants, errors, snapshot_download
from huggingface_hub.utils import tqdm

from moesaic.checkpoint.headers import (
    INDEX_FILE,
    SIDE_FILES,
    SINGLE_FILE,
    TensorInfo,
    check_entries,
    collect,
    no_weights,
    read_header,
    shard_names,
)
from moesaic.common.errors import MoesaicError
from moesaic.common.files import DISK_ERRORS

_SMALL_FILES = ["config.json", INDEX_FILE, *SIDE_FILES]
"""An allow-list: whatever else a repository holds (code, pickles, other formats) is never fetched."""


class _Bars(tqdm):
    """The hub's own progress bars on a terminal, nothing elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": not sys.stderr.isatty()})


class _NoBars(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **{**kwargs, "disable": True})


def download(repo: str, revision: str | None) -> Path:
    """Fetch what is not in the cache yet; returns the snapshot folder, whose name is the commit."""
    with _explained(repo, revision):
        folder = _fetch(repo, revision, [*_SMALL_FILES, SINGLE_FILE])
        if not (folder / SINGLE_FILE).exists():
            names = sorted(set(_weight_map(folder, repo).values()))
            _fetch(repo, folder.name, [glob.escape(name) for name in names])
    return folder


def fetch_headers(repo: str, revision: str | None) -> tuple[Path, dict[str, TensorInfo], int]:
    """The snapshot folder (small files only), the tensors from the headers, and the bytes of weights not yet here."""
    with _explained(repo, revision):
        folder = _fetch(repo, revision, _SMALL_FILES)
        single = _weights(repo, folder.name, [SINGLE_FILE])
        weight_map = {} if single else _weight_map(folder, repo)
        files = single or _weights(repo, folder.name, sorted(set(weight_map.values())))
        for name in sorted(set(weight_map.values()) - {file.filename for file in files}):
            raise MoesaicError(f"{repo}: {INDEX_FILE} names {name}, which the repository does not have; tell its owner")
        with ThreadPoolExecutor(8) as pool:
            parsed = pool.map(lambda file: (file.filename, _header(repo, folder, file)), files)
            tensors = collect(folder / INDEX_FILE, weight_map, dict(parsed))
    return folder, tensors, sum(file.file_size or 0 for file in files if file.will_download)


def _fetch(repo: str, revision: str | None, patterns: list[str]) -> Path:
    return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, tqdm_class=_Bars))


def _weights(repo: str, commit: str, names: list[str]) -> list[DryRunFileInfo]:
    """Size and whereabouts of weight files, without fetching them; those that the repository lacks are left out."""
    patterns = [glob.escape(name) for name in names]
    return snapshot_download(repo, revision=commit, allow_patterns=patterns, dry_run=True, tqdm_class=_NoBars)


def _weight_map(folder: Path, repo: str) -> dict[str, str]:
    if not (folder / INDEX_FILE).exists():
        raise no_weights(repo, HfApi().list_repo_files(repo, revision=folder.name))
    return shard_names(folder / INDEX_FILE)


def _header(repo: str, folder: Path, remote: DryRunFileInfo) -> dict[str, TensorInfo]:
    file = folder / remote.filename
    if file.exists():
        return read_header(file)
    try:
        found = HfApi().parse_safetensors_file_metadata(repo, remote.filename, revision=folder.name)
        entries = {
            name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": list(info.data_offsets)}
            for name, info in found.tensors.items()
        }
        size = remote.file_size
        data = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        # The hub's helper does not tell the header's length: it is what the tensors leave of the file.
        start = max(8, (size or 0) - data)
    except (errors.SafetensorsParsingError, ValueError, TypeError, LookupError) as error:
        raise MoesaicError(f"{repo}: {remote.filename} is not a safetensors file; tell its owner") from error
    return check_entries(entries, file=file, start=start, file_size=size)


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the hub, the network and the cache's disk as one line that says what to do."""
    try:
        yield
    except (OSError, httpx2.HTTPError, errors.HFValidationError) as error:
        raise MoesaicError(f"{repo}: {_way_out(error, repo, revision)}") from error


def _way_out(error: Exception, repo: str, revision: str | None) -> str:
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__  # the hub did answer; that the cache lacks the files is only the consequence
    page = f"{constants.ENDPOINT}/{repo}"
    log_in = "log in with `hf auth login` (or set HF_TOKEN)"
    text = " ".join(str(error).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    cases = [
        (
            isinstance(error, errors.GatedRepoError),
            f"is gated; accept its licence at {page} with your account, then {log_in}",
        ),
        (
            isinstance(error, errors.RevisionNotFoundError),
            f"has no revision {revision!r}; see the branches, tags and commits at {page}/commits",
        ),
        (
            isinstance(error, errors.RepositoryNotFoundError) or status == 401,
            f"no folder here, and no repository on the hub that you may read; check the spelling, or {log_in}",
        ),
        (
            constants.is_offline_mode(),
            "is not completely in the hub's cache, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids to fetch it; "
            "unset it, or give a folder",
        ),
        (isinstance(error, errors.DisabledRepoError), f"was disabled by the hub; see {page}"),
        (status == 403, f"may not be read with your token; accept its licence at {page}, and {log_in}"),
        (status == 429, f"the hub refuses so many requests; wait a few minutes, and {log_in}"),
        (status is not None, f"the hub answered {status} ({text}); try again later"),
        (
            isinstance(error, httpx2.HTTPError | errors.LocalEntryNotFoundError | ConnectionError),
            f"is not completely in the hub's cache, and {constants.ENDPOINT} cannot be reached; "
            "check the network (HTTPS_PROXY, HF_ENDPOINT), or give a folder",
        ),
        (isinstance(error, errors.HFValidationError), f"is not a hub id ({text}); it looks like org/name"),
        (
            isinstance(error, OSError) and error.errno in DISK_ERRORS,
            f"cannot be put into {constants.HF_HUB_CACHE} ({text})",
        ),
    ]
    return next((message for applies, message in cases if applies), f"cannot be fetched ({text})")
