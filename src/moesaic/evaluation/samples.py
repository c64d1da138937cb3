"""What was asked and answered, row by row: scores for the results file, and all of it for `--samples`. Torch-free."""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from moesaic.common.files import explained, write_file
from moesaic.common.numbers import finite_only

MARK = "moesaic-samples/1"
"""What the first line of a samples file has."""


def row_scores(asked: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any] | None:
    """The score of every row, in the order of the rows, and a hash of these; None where a score is no number per row.

    Args:
        asked: lm-eval's samples of all parts of a task.
        metric: `metric,filter`.
    """
    name, _, filter_name = metric.partition(",")
    own = [one for one in asked if one.get("filter") == filter_name]
    values = [one.get(name) for one in own]
    if not own or not all(isinstance(value, (int, float)) for value in values):
        return None
    digest = xxhash.xxh3_128("".join(one["doc_hash"] for one in own).encode()).hexdigest()
    return {"hash": digest, "scores": [float(value or 0) for value in values]}


def lines_of_benchmark(task: str, parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A line for each row of a task and each way to read its answer; `parts` are lm-eval's samples by part."""
    for part, asked in parts.items():
        for one in asked:
            yield {
                "task": task,
                "part": part,
                "row": one["doc_id"],
                "requests": [_request(arguments) for arguments in one["arguments"]],
                "responses": [response for of_request in one["resps"] for response in of_request],
                "filter": one["filter"],
                "answers": one["filtered_resps"],
                "target": one["target"],
                "scores": {name: one[name] for name in one["metrics"]},
            }


def _request(arguments: Sequence[Any]) -> dict[str, Any]:
    context, *rest = arguments
    if rest and isinstance(rest[0], str):
        return {"context": context, "continuation": rest[0]}
    return {"context": context}


class SamplesFile:
    """The file of `--samples`: after every task it holds all that is known, those of earlier calls included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, list[str]] = {}
        if path.exists():
            with explained(path):
                _, *lines = path.read_text(encoding="utf-8").splitlines()
            for line in lines:
                self._lines.setdefault(json.loads(line)["task"], []).append(line)

    def put(self, task: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Replace a task's lines, and write the file in one step."""
        self._lines[task] = [json.dumps(finite_only(line), ensure_ascii=False, default=str) for line in lines]
        head = json.dumps({"format": MARK})
        write_file(self._path, "".join(f"{line}\n" for line in [head, *itertools.chain(*self._lines.values())]))
