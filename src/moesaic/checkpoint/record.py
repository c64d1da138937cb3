"""What is written beside the weights: moesaic.json (where they come from), the model card, the files that come along.

Torch-free.
"""

import json
import platform
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import moesaic
from moesaic.checkpoint.config_file import OLDEST_TRANSFORMERS
from moesaic.checkpoint.headers import SIDE_FILES, VOCABULARY_FILES
from moesaic.checkpoint.source import Checkpoint, file_inside
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained, load_json
from moesaic.common.recipe import Count, Size, load_document

PROVENANCE_FILE = "moesaic.json"
FORMAT = "moesaic/1"
CARD_FILE = "README.md"
OUT_IN_CARDS = "OUT"
"""What a card calls the folder that it lies in; a push puts the repository's name there."""

_PACKAGES = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy")


_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(@\S+)?")
_MARKUP = re.compile(r"[\\`*_{}\[\]<>|#!~$&]")


def versions() -> dict[str, str]:
    """Versions of moesaic, Python and the libraries that determine the result, without importing them."""
    found = {"moesaic": moesaic.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def weights_hash(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """xxh3 (128 bits, hex) over the sorted (name, dtype code, shape, hash of the bytes) of all tensors.

    So it depends on the tensors alone: not on shards, their order or who wrote them.
    """
    import xxhash

    state = xxhash.xxh3_128()
    for name, dtype, shape, digest in sorted(
        (name, dtype, list(shape), digest) for name, dtype, shape, digest in tensors
    ):
        state.update(json.dumps([name, dtype, shape, digest], separators=(",", ":")).encode() + b"\n")
    return state.hexdigest()


def combine(checkpoint: Checkpoint, tensor_hashes: Mapping[str, str]) -> str:
    """`weights_hash` of a checkpoint from the result of `scan` over all of its tensors."""
    infos = checkpoint.tensors.values()
    return weights_hash((info.name, info.dtype, info.shape, tensor_hashes[info.name]) for info in infos)


def fingerprint(checkpoint: Checkpoint, workers: int = 1) -> str:
    """`weights_hash` of any checkpoint; reads all of it."""
    from moesaic.checkpoint.streaming import scan

    return combine(checkpoint, scan(checkpoint.tensors.values(), workers, allow_nonfinite=True))


def source_record(checkpoint: Checkpoint, weights_hash: str | None) -> dict[str, Any]:
    """The entry of moesaic.json for one source; `config_hash` is the xxh3 of config.json's sorted content."""
    import xxhash

    config = json.dumps(checkpoint.config, sort_keys=True, separators=(",", ":")).encode()
    return {
        "name": checkpoint.name,
        "revision": checkpoint.revision,
        "path": str(checkpoint.path),
        "config_hash": xxhash.xxh3_128_hexdigest(config),
        "weights_hash": weights_hash,
    }


def write_provenance(
    folder: Path,
    *,
    verb: str,
    recipe: Mapping[str, Any],
    seed: int | None,
    sources: Sequence[Mapping[str, Any]],
    weights_hash: str | None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write moesaic.json: what made this checkpoint, from what, with which seed and versions.

    There is no time and no host in it: the same run writes the same bytes. `extra` adds keys of the verb's own.
    """
    record = {
        "format": FORMAT,
        "verb": verb,
        "recipe": dict(recipe),
        "seed": seed,
        "versions": versions(),
        "sources": [dict(source) for source in sources],
        "weights_hash": weights_hash,
    }
    assert not record.keys() & (extra or {}).keys(), "extra keys must be new"
    path = folder / PROVENANCE_FILE
    text = json.dumps(record | dict(extra or {}), indent=2, ensure_ascii=False)
    with explained(path):
        path.write_text(text + "\n", encoding="utf-8")


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """The content of moesaic.json, or None for a checkpoint without it; an unknown format is a MoesaicError."""
    path = folder / PROVENANCE_FILE
    if not path.exists():
        return None
    record = load_json(file_inside(folder, PROVENANCE_FILE, told_by=str(folder)))
    if record.get("format") != FORMAT:
        raise MoesaicError(f"{path}: format is {record.get('format')!r}, this version reads {FORMAT!r}; update moesaic")
    load_document(_Record, record, str(path), others=True)
    return record


def original_experts(checkpoint: Checkpoint, count: int, layers: int) -> list[list[int]]:
    """Per MoE layer, the id that each expert had in the first model of a chain of `expand` and `extract`."""
    record = read_provenance(checkpoint.path) or {}
    known = record.get("experts", {}).get("original", [])
    if len(known) == layers and all(len(ids) == count for ids in known):
        return known
    return [list(range(count)) for _ in range(layers)]


@dataclass(frozen=True, kw_only=True)
class _Experts:
    original: tuple[tuple[Count, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Routing:
    rule: dict[str, Any]
    selection_bias: tuple[tuple[float, ...], ...] | None

    def __post_init__(self) -> None:
        if len({len(row) for row in self.selection_bias or ()}) > 1:
            raise MoesaicError("selection_bias has rows of different lengths")


@dataclass(frozen=True, kw_only=True)
class _Source:
    name: str = ""
    path: str = ""
    weights_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Model:
    sample_hash: str
    num_experts: Size


@dataclass(frozen=True, kw_only=True)
class _Ancestor:
    model: _Model
    ids: tuple[tuple[Count, ...], ...]


@dataclass(frozen=True, kw_only=True)
class _Record:
    """What the verbs rely on; there are further keys of each verb's own."""

    verb: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    weights_hash: str | None = None
    sources: tuple[_Source, ...] = ()
    experts: _Experts = field(default_factory=_Experts)
    routing: _Routing | None = None
    lineage: tuple[_Ancestor, ...] | None = None


def side_files(checkpoint: Checkpoint, patterns: Sequence[str] = SIDE_FILES) -> list[str]:
    """Names of the files of a source checkpoint's folder that match the patterns, sorted.

    Raises:
        MoesaicError: a link among them leads nowhere or outside.
    """
    folder = checkpoint.path
    paths = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_symlink() or path.is_file()]
    found = sorted(path.relative_to(folder).as_posix() for path in paths)
    names = [name for name in found if any(_matches(name, pattern) for pattern in patterns)]
    for name in names:
        if not file_inside(folder, name, told_by=str(folder)).exists():
            raise MoesaicError(f"{folder / name}: is a link to a file that does not exist; put the file itself there")
    return names


def check_side_files(checkpoint: Checkpoint) -> int:
    """Refuse files that would be copied broken (JSON that is none); returns the bytes of all of them.

    Raises:
        MoesaicError: names the file.
    """
    paths = [checkpoint.path / name for name in side_files(checkpoint)]
    for path in paths:
        if path.suffix == ".json":
            load_json(path)
    return sum(path.stat().st_size for path in paths)


def copy_side_files(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy tokenizer, generation_config.json and chat templates byte for byte; returns their names.

    Links are followed within the checkpoint only, so that a folder from a stranger cannot take in other files.
    """
    names = side_files(checkpoint)
    for name in names:
        source = file_inside(checkpoint.path, name, told_by=str(checkpoint.path))
        target = folder / name
        with explained(target):
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
    return names


def _matches(name: str, pattern: str) -> bool:
    """fnmatch per path component."""
    parts, patterns = name.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


# --- the model card: everything that comes from users or checkpoints is escaped ---------------------------------------


def front_matter(*, bases: Sequence[str], tags: Sequence[str], license_name: str | None = None) -> str:
    """The YAML block at the top of a card, with its fences: `library_name`, `license`, `base_model` and `tags`.

    `bases` are names as the user gave them; they become `base_model`, hub ids without their revision.
    """
    import yaml

    front: dict[str, object] = {"library_name": "transformers"}
    if license_name:
        front["license"] = _line(license_name)
    front["base_model"] = list(dict.fromkeys(map(_without_revision, bases)))
    front["tags"] = list(dict.fromkeys(["moesaic", "mixture-of-experts", *map(_line, tags)]))
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n"


def model_card(
    *,
    title: str,
    bases: Sequence[str],
    tags: Sequence[str],
    command: Sequence[str],
    facts: Mapping[str, object],
    license_name: str | None = None,
) -> str:
    """Markdown with front matter, the command and a table of facts.

    `command` is the argument list, quoted for a shell; `facts` are the table's rows in order.
    """
    rows = [f"| {escape(name)} | {escape(value)} |" for name, value in facts.items()]
    parts = [
        front_matter(bases=bases, tags=tags, license_name=license_name),
        f"# {escape(title)}",
        "",
        "Made with Moesaic; `moesaic.json` records recipe, seed, versions and hashes.",
        "",
        fenced(shlex.join(command), language="bash"),
        "",
        "| What | Value |",
        "|---|---|",
        *rows,
        "",
    ]
    return "\n".join(parts)


def how_to_load(folder: Path, config: Mapping[str, Any]) -> str:
    """The end of a card: the code that loads what lies in the folder, and what it needs."""
    ours = "auto_map" in config
    has_tokenizer = any(next(folder.glob(pattern), None) for pattern in VOCABULARY_FILES)
    names = "AutoModelForCausalLM, AutoTokenizer" if has_tokenizer else "AutoModelForCausalLM"
    code = [
        f"from transformers import {names}",
        "",
        f'name = "{OUT_IN_CARDS}"',
        f"model = AutoModelForCausalLM.from_pretrained(name{', trust_remote_code=True' if ours else ''})",
        *(["tokenizer = AutoTokenizer.from_pretrained(name)"] if has_tokenizer else []),
    ]
    said = f"""
The architecture's code comes with the model. It needs transformers {OLDEST_TRANSFORMERS} or newer; after
`import moesaic` it is known, and `trust_remote_code` not needed.
"""
    return f"\n{fenced(chr(10).join(code), language='python')}\n{said if ours else ''}"


def _without_revision(base: str) -> str:
    match = None if Path(base).exists() else _HUB_ID.fullmatch(base)
    return match[1] if match else base


def write_card(folder: Path, card: str) -> None:
    """Write the card as README.md."""
    path = folder / CARD_FILE
    with explained(path):
        path.write_text(card, encoding="utf-8")


def escape(value: object) -> str:
    """Plain text for a paragraph, heading or table cell: one line, no markup, no HTML."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", _line(value))


def fenced(text: str, *, language: str) -> str:
    """A code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _line(value: object) -> str:
    return " ".join(str(value).split())
