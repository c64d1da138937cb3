"""Hub data sets as sources: `hf://org/name[@revision][:config][:split]`, read as a stream."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moesaic.common.errors import MoesaicError
from moesaic.data.readers import Record, import_optional

PREFIX = "hf://"
_REFERENCE = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^:@]+))?(:(?P<first>[^:]+))?(:(?P<second>[^:]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubData:
    """A split of a hub data set at one commit, which stands for its content."""

    name: str
    commit: str
    config: str | None
    split: str


def resolve_hub(path: str) -> HubData:
    """Parse the reference and find the commit of its revision (no request where the revision is a commit already).

    With one part after the name it is the split, with two the config and the split.
    """
    match = _REFERENCE.fullmatch(path.removeprefix(PREFIX))
    if match is None:
        raise MoesaicError(f"{path}: expected hf://org/name[@revision][:config][:split]")
    name, revision, first, second = match.group("name", "revision", "first", "second")
    config, split = (first, second) if second else (None, first or "train")
    commit = revision if revision and _COMMIT.fullmatch(revision) else _find_commit(path, name, revision)
    return HubData(name=name, commit=commit, config=config, split=split)


def read_hub(data: HubData) -> Iterator[Record]:
    """The records of the split, as they arrive."""
    where = f"{PREFIX}{data.name}:{data.split}"
    rows = iter(_open(data, where))
    number = 0
    while True:
        try:
            fields: Any = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever the network or the data set's files raise
            raise MoesaicError(f"{where}: reading stopped after row {number} ({_first_line(error)})") from error
        number += 1
        yield Record(f"{where}: row {number}", fields)


def _open(data: HubData, where: str) -> Any:
    datasets = import_optional("datasets", f"{where}: hub data sets need")
    try:
        return datasets.load_dataset(data.name, data.config, split=data.split, revision=data.commit, streaming=True)
    except Exception as error:  # not found, no such config or split, gated, offline: the library says which
        raise MoesaicError(f"{where}: cannot be opened ({_first_line(error)})") from error


def _find_commit(path: str, name: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:
        reason = _first_line(error)
        raise MoesaicError(f"{path}: cannot find the revision on the hub ({reason}); offline, give @COMMIT") from error
    assert commit is not None
    return commit


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
