"""Calibration texts: which records of which files, as what text, after which demonstrations. Torch-free.

A record's place in the order is a hash of (seed, its number), so samples are nested: the first 5 of 100 are the same 5,
and adding files at the end moves nothing.
"""

import heapq
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from moesaic.common import seeds
from moesaic.common.errors import MoesaicError
from moesaic.data.files import find_files, read_records
from moesaic.data.mmlu import category_of
from moesaic.data.recipe import SourceRecipe
from moesaic.data.vocabulary import refuse_unknown_ids

_FIELD = re.compile(r"\{(\w+)(?:\[(\d+)\])?\}")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What to calibrate on."""

    path: str
    """A file or folder: .jsonl, .parquet (field `text`), .txt, .md, .gz and .zst included."""
    template: str | None = None
    """Text of a record with {field} in place of its fields, and {answer_text} for the right choice; None: by fields."""
    examples: int | None = None
    """Number of records, drawn by the seed; None: all."""
    shots: int = 0
    """Other records put before each example, the same ones for all."""
    split: float | None = None
    """Draw from this share of the records only, so that the others can be evaluated on (EMO, appendix C: 0.4)."""
    only: tuple[str, str] | None = None
    """(field, value): use the records with this value only."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.examples is not None and self.examples < 1:
            raise MoesaicError(f"--examples {self.examples}: must be at least 1")
        if self.shots < 0:
            raise MoesaicError(f"--shots {self.shots}: must be 0 or more")
        if self.split is not None and not 0.0 < self.split <= 1.0:
            raise MoesaicError(f"--split {self.split}: must be above 0 and at most 1, such as 0.4")


class _Row(NamedTuple):
    place: int
    number: int
    text: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is calibrated on."""

    texts: list[str]
    rows: list[str]
    """Digests of the records that must not be evaluated on: the whole share of `split`, or those that are used."""


def calibration_texts(calibration: Calibration, *, quiet: bool = True) -> list[str]:
    """The texts alone of `draw`."""
    return draw(calibration, quiet=quiet).texts


def record_digest(fields: Mapping[str, Any]) -> str:
    """16 digits for the content of a record, wherever it lies and in whatever format."""
    text = json.dumps(fields, sort_keys=True, ensure_ascii=False, default=str)
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


def draw(calibration: Calibration, *, quiet: bool = True) -> Drawn:
    """The texts, in the order of the draw; with `shots`, each after the same demonstrations, separated by empty lines.

    Demonstrations are the last records of the same order, so they do not depend on `examples`.

    Raises:
        MoesaicError: no text is left, not enough records for the shots, a record without the fields that the template
            names or of which no text is known.
    """
    share: list[str] = []
    rows: Iterable[_Row] = _rows(calibration, share, quiet=quiet)
    shots = calibration.shots
    last: list[_Row] = []
    if shots:
        everything = list(rows)
        last = heapq.nlargest(shots, everything)
        rows = (row for row in everything if row not in last)
        if len(everything) <= shots:
            raise MoesaicError(
                f"--shots {shots}: {calibration.path} has {len(everything)} usable records; demonstrations and "
                "examples must be different ones"
            )
    chosen = sorted(rows) if calibration.examples is None else heapq.nsmallest(calibration.examples, rows)
    if not chosen:
        where = "" if calibration.only is None else f" with {calibration.only[0]} = {calibration.only[1]}"
        where += "" if calibration.split is None else f" in the share of --split {calibration.split:g}"
        raise MoesaicError(f"{calibration.path}: the calibration set is empty: no record{where} has any text")
    return Drawn(
        texts=["\n\n".join([*(row.text for row in last), row.text]) for row in chosen],
        rows=share if calibration.split is not None else [row.digest for row in (*last, *chosen)],
    )


def categories(path: str, field: str) -> list[str]:
    """The values of a field over all records, sorted."""
    found = {str(_field(record.fields, field, record.where)) for record in _records(path, quiet=True)}
    if not found:
        raise MoesaicError(f"{path}: the calibration set is empty")
    return sorted(found)


def in_split(digest: str, *, share: float, seed: int) -> bool:
    """Whether a record is in the share that is calibrated on, by the digest of its content; the rest is for evaluation.

    Depends on the seed and the content alone: not on the file, its format, or the record's place in it.
    """
    return seeds.within(share, "split", seed, digest)


def _rows(calibration: Calibration, share: list[str], *, quiet: bool) -> Iterator[_Row]:
    """The usable records; adds to `share` the digests of all that `split` draws from."""
    for number, record in enumerate(_records(calibration.path, quiet=quiet)):
        digest = record_digest(record.fields)
        if calibration.split is not None:
            if not in_split(digest, share=calibration.split, seed=calibration.seed):
                continue
            share.append(digest)
        if calibration.only is not None:
            name, value = calibration.only
            if str(_field(record.fields, name, record.where)) != value:
                continue
        text = render(record.fields, calibration.template, record.where)
        if text.strip():
            yield _Row(seeds.order("sample", calibration.seed, number), number, text, digest)


def _records(path: str, *, quiet: bool) -> Iterator[Any]:
    source = SourceRecipe(path=path, domain="calibration")
    for file in find_files(source, quiet=quiet):
        yield from read_records(file, None, lambda _amount: None)


def render(fields: Mapping[str, Any], template: str | None, where: str) -> str:
    """The text of one record."""
    if template is not None:
        known = dict(fields)
        if is_choice(fields):
            known["answer_text"] = fields["choices"][fields["answer"]]
        try:
            return fill(template, known)
        except MoesaicError as error:
            raise MoesaicError(f"{where}: {error}") from error
    for needed, text in _TEXTS:
        if all(name in fields for name in needed):
            rendered = text(fields, where)
            if not isinstance(rendered, str):
                raise MoesaicError(f"{where}: field {needed[0]!r} must be a string; give a --template")
            return rendered
    known = " | ".join("+".join(needed) for needed, _ in _TEXTS)
    raise MoesaicError(
        f"{where}: no text is known for a record with {', '.join(fields)} (known: {known}); give a --template"
    )


def fields_of(template: str) -> list[str]:
    """The fields that a template names."""
    return list(dict.fromkeys(match[1] for match in _FIELD.finditer(template)))


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """A template with the values of `{field}`, and of `{field[0]}` where it is a list.

    Raises:
        MoesaicError: a field that is not there, or a list that is too short.
    """

    def value(match: re.Match[str]) -> str:
        found = _field(fields, match[1], "")
        if match[2] is None:
            return str(found)
        if not isinstance(found, list) or int(match[2]) >= len(found):
            raise MoesaicError(f"{match[1]}: has no value number {match[2]}, counted from 0, got {found!r}")
        return str(found[int(match[2])])

    return _FIELD.sub(value, template.replace("\\n", "\n"))


_DERIVED: Mapping[str, tuple[str, Callable[[str], str]]] = {"mmlu_category": ("subject", category_of)}
"""Fields that no record has: the field that says them, and how."""


def _field(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in fields and name in _DERIVED:
        source, derive = _DERIVED[name]
        return derive(str(_field(fields, source, where)))
    if name not in fields:
        place = f"{where}: " if where else ""
        raise MoesaicError(f"{place}no field {name!r}; the record has {', '.join(map(str, fields))}")
    return fields[name]


def is_choice(fields: Mapping[str, Any]) -> bool:
    """Whether a record is a multiple-choice question with an answer that is the number of one of its choices."""
    choices, answer = fields.get("choices"), fields.get("answer")
    return isinstance(choices, list) and type(answer) is int and 0 <= answer < len(choices)


def _choice(fields: Mapping[str, Any], where: str) -> str:
    if not is_choice(fields):
        raise MoesaicError(f"{where}: answer must be the index of one of the choices, got {fields['answer']!r}")
    return _asked(fields, str(fields["choices"][fields["answer"]]))


def _asked(fields: Mapping[str, Any], answer: str) -> str:
    context = f"{fields['context']}\n" if fields.get("context") else ""
    return f"{context}Question: {fields['question']}\nAnswer: {answer}"


def _answer(fields: Mapping[str, Any], where: str) -> str:
    answer = fields["answer"]
    if isinstance(answer, str | int | float):
        return str(answer)
    raise MoesaicError(f"{where}: answer must be text or a number, got {answer!r}; give a --template")


def _first(answers: Any, where: str) -> str:
    """The first of the answers: texts, or SQuAD's objects with a `text`."""
    if isinstance(answers, Sequence) and not isinstance(answers, str):
        answers = answers[0] if answers else None
    if isinstance(answers, Mapping):  # SQuAD: an object for each answer, or on the hub one object of lists
        return _first(answers.get("text"), where)
    if not isinstance(answers, str):
        raise MoesaicError(f"{where}: answers must be texts, at least one; give a --template")
    return answers


def _paragraph(fields: Mapping[str, Any], where: str) -> str:
    """A SQuAD paragraph with its questions; those without an answer are left out."""
    questions = fields["qas"]
    if not isinstance(questions, list) or not all(isinstance(one, Mapping) and "question" in one for one in questions):
        raise MoesaicError(f"{where}: qas must be a list of objects with a question; give a --template")
    asked = [
        f"Question: {one['question']}\nAnswer: {_first(one['answers'], where)}"
        for one in questions
        if one.get("answers")
    ]
    return "\n".join([str(fields["context"]), *asked])


def _joined(first: str, second: str, between: str = "") -> Callable[[Mapping[str, Any], str], str]:
    def text(fields: Mapping[str, Any], where: str) -> str:
        for name in (first, second):
            if not isinstance(fields[name], str):
                raise MoesaicError(f"{where}: {name} must be text, got {fields[name]!r}; give a --template")
        return f"{fields[first]}{between}{fields[second]}"

    return text


_TEXTS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], Any]], ...] = (
    (("question", "choices", "answer"), _choice),
    (("question", "answer"), lambda fields, where: _asked(fields, _answer(fields, where))),
    (("question", "answers"), lambda fields, where: _asked(fields, _first(fields["answers"], where))),
    (("prompt", "completion"), _joined("prompt", "completion")),
    (("prompt", "canonical_solution"), _joined("prompt", "canonical_solution")),
    (("text", "code"), _joined("text", "code", "\n")),
    (("context", "qas"), _paragraph),
    (("text",), lambda fields, _: fields["text"]),
)
"""Fields that a record has -> its text; the first that fits."""


def domain_of(path: str) -> str:
    """The name of calibration data: the file's name up to its first dot."""
    return Path(path).name.partition(".")[0] or path


def encode_texts(
    texts: Sequence[str], tokenizer: Any, *, max_tokens: int, vocab_size: int, name: str
) -> list[list[int]]:
    """Token ids of each text, without padding tokens, cut to the first `max_tokens`.

    Raises:
        MoesaicError: nothing but padding is left, or a token that the model does not have.
    """
    others = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    padding = None if tokenizer.pad_token_id in others else tokenizer.pad_token_id
    sequences = []
    for text in texts:
        ids = [token for token in tokenizer(text)["input_ids"] if token != padding][:max_tokens]
        if ids:
            sequences.append(ids)
    if not sequences:
        raise MoesaicError(f"{name}: all tokens of the calibration set are padding; there is nothing to score with")
    refuse_unknown_ids(max(map(max, sequences)), vocab_size, name)
    return sequences
