"""Edits of documents: what careless people, other programs and broken disks do to a file. Pure functions of bytes."""

import copy
import io
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

WEIRD: tuple[Any, ...] = (
    *(None, True, False, "", "x", "-1", "5e-4", "\0", "a\0b", "../../x", "/", "\n", "\u2028", "é" * 300),
    *("\ud800", "topk", "silu", "{}", "[]", "null", "NaN", "/dev/null", "http://x", "org/name", "~nobody/x"),
    *(-1, 0, 1, 2, 3, 7, 33, 10_000, 10**6, 10**10, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**20)),
    *(0.5, -0.5, 1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *([], {}, [[]], [None], [1, "a"], [0, 0], [-1], {"a": 1}, {"": None}, [[[[[[[[1]]]]]]]], list(range(1000))),
)
"""Values of every type, small and huge, and names that no file has."""


def _deep() -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    return value


Edit = Callable[[Any, int, Any], Any]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key of it, from the top."""
    level = [value]
    while level:
        below = []
        for container in level:
            keys = list(container) if isinstance(container, dict) else list(range(min(len(container), 8)))
            for key in keys:
                yield container, key
                if isinstance(container[key], (dict, list)):
                    below.append(container[key])
        level = below


def _at(value: Any, place: int) -> tuple[Any, Any] | None:
    places = list(_places(value))
    return places[place % len(places)] if places else None


def _replace(container: Any, key: Any, weird: Any) -> None:
    container[key] = copy.deepcopy(weird)


def _delete(container: Any, key: Any, _weird: Any) -> None:
    del container[key]


def _rename(container: Any, key: Any, weird: Any) -> None:
    if isinstance(container, dict):
        container[str(weird)] = container.pop(key)
    else:
        container.insert(key, copy.deepcopy(weird))


def _add(container: Any, key: Any, weird: Any) -> None:
    if isinstance(container, dict):
        container["another_key"] = copy.deepcopy(weird)
    else:
        container.append(copy.deepcopy(container[key]))


def _scale(container: Any, key: Any, weird: Any) -> None:
    value = container[key]
    if isinstance(value, (int, float)):
        container[key] = {0: -value, 1: value + 1, 2: value * 1000, 3: value / 2}[len(repr(weird)) % 4]
    elif isinstance(value, (list, str)):
        container[key] = value * 2 if len(repr(weird)) % 2 else value[: len(value) // 2]
    else:
        container[key] = [value]


def _nest(container: Any, key: Any, _weird: Any) -> None:
    container[key] = _deep()


STRUCTURAL: dict[str, Callable[[Any, Any, Any], None]] = {
    "replace": _replace,
    "delete": _delete,
    "rename": _rename,
    "add": _add,
    "scale": _scale,
    "nest": _nest,
}


def _truncate(content: bytes, place: int, _weird: Any) -> bytes:
    return content[: place % (len(content) + 1)]


def _flip(content: bytes, place: int, _weird: Any) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[place % len(changed)] ^= 1 << (place % 8)
    return bytes(changed)


def _insert(content: bytes, place: int, weird: Any) -> bytes:
    at = place % (len(content) + 1)
    return content[:at] + ascii(weird).encode() + content[at:]


def _digits(content: bytes, place: int, _weird: Any) -> bytes:
    """A number of 5,000 digits in the place of some digit."""
    spots = [index for index, byte in enumerate(content) if chr(byte).isdigit()]
    if not spots:
        return content
    at = spots[place % len(spots)]
    return content[:at] + b"7" * 5000 + content[at + 1 :]


def _other_kind(content: bytes, place: int, _weird: Any) -> bytes:
    array = io.BytesIO()
    np.save(array, np.arange(4))
    choices = (b"", b"\0" * 64, b"\xff\xfe", b"PK\x03\x04", array.getvalue(), b"[1]", b"null", b"{}", content * 2)
    return choices[place % len(choices)]


RAW: dict[str, Callable[[bytes, int, Any], bytes]] = {
    "truncate": _truncate,
    "flip": _flip,
    "insert": _insert,
    "digits": _digits,
    "other": _other_kind,
}


def _structural(content: bytes, kind: str, place: int, weird: Any, parse: Any, write: Any) -> bytes:
    value = parse(content)
    if (found := _at(value, place)) is not None:
        STRUCTURAL[kind](*found, weird)
    try:
        return write(value)
    except (RecursionError, ValueError):  # this writer cannot hold it; the file would not exist
        return content


def _write_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _write_yaml(value: Any) -> bytes:
    return yaml.safe_dump(value, sort_keys=False).encode()


def _edit_lines(content: bytes, kind: str, place: int, weird: Any) -> bytes:
    lines = content.splitlines(keepends=True)
    at = place % len(lines)
    lines[at] = _structural(lines[at], kind, place // len(lines), weird, json.loads, _write_json) + b"\n"
    return b"".join(lines)


def _edit_arrays(content: bytes, kind: str, place: int, weird: Any) -> bytes:
    with np.load(io.BytesIO(content)) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    name = sorted(arrays)[place % len(arrays)]
    array = arrays[name]
    changes: dict[str, Callable[[], Any]] = {
        "replace": lambda: np.array(weird, dtype=object),
        "delete": lambda: None,
        "rename": lambda: array.astype(np.complex64 if place % 2 else np.str_),
        "add": lambda: array[..., None],
        "scale": lambda: array.astype(np.int64) * -1000,
        "nest": lambda: array[:1] if place % 2 else np.float64(3),
    }
    arrays[name] = changes[kind]()
    kept = {key: value for key, value in arrays.items() if value is not None}
    buffer = io.BytesIO()
    np.savez(buffer, **kept)
    return buffer.getvalue()


def _edit_header(content: bytes, kind: str, place: int, weird: Any) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = _structural(content[8 : 8 + length], kind, place, weird, json.loads, _write_json)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


_BY_SUFFIX: dict[str, Callable[[bytes, str, int, Any], bytes]] = {
    ".json": partial(_structural, parse=json.loads, write=_write_json),
    ".yaml": partial(_structural, parse=yaml.safe_load, write=_write_yaml),
    ".jsonl": _edit_lines,
    ".npz": _edit_arrays,
    ".safetensors": _edit_header,
}

edits = st.tuples(
    st.sampled_from([*STRUCTURAL, *STRUCTURAL, *RAW]), st.integers(0, 100_000), st.integers(0, len(WEIRD) - 1)
)
"""(kind, place, index into `WEIRD`)."""


def edited(file: Path, content: bytes, edit: tuple[str, int, int]) -> bytes:
    """The content of a file after one edit."""
    kind, place, number = edit
    if kind in RAW:
        return RAW[kind](content, place, WEIRD[number])
    return _BY_SUFFIX[file.suffix](content, kind, place, WEIRD[number])
