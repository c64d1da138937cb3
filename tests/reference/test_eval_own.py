"""Own task files give the numbers of lm-eval called directly on the same rows, and so do lm-eval's files by path."""

import csv
import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from moesaic.evaluation import harness
from moesaic.evaluation.evaluate import evaluate
from moesaic.loading import load, load_tokenizer
from tests.tiny_evals import choice_rows, save_tiny_dense, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs

_METRICS = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
_LINES = "{% for label in labels %}{{label}}. {{choices[loop.index0]}}\n{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dense(tmp_path_factory.mktemp("dense"), reach=1024)


def _rows() -> list[dict[str, Any]]:
    rows = choice_rows(3, choices=4) + choice_rows(3, choices=5, seed=1) + choice_rows(2, choices=2, seed=2)
    return [row | {"labels": list("ABCDE"[: len(row["choices"])])} for row in rows]


def _direct(lm: Any, folder: Path, names: list[str]) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return cast(Any, lm_eval.simple_evaluate)(model=lm, tasks=names, task_manager=manager, log_samples=False)["results"]


def _their_task(folder: Path, name: str, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"task": name, **config}))
    return file


def test_choices_by_letter_and_by_text(checkpoint: Path, tmp_path: Path):
    rows: list[Any] = _rows()
    data = {"data_files": {"test": str(write_rows(tmp_path / "theirs.json", rows)), "train": str(tmp_path / "s.json")}}
    shots: list[Any] = [row | {"labels": list("ABCD")} for row in choice_rows(4, seed=3)]
    write_rows(tmp_path / "s.json", shots)
    same = {"dataset_path": "json", "dataset_kwargs": data, "output_type": "multiple_choice", "test_split": "test"}
    same |= {"fewshot_split": "train", "num_fewshot": 2, "doc_to_target": "answer"}
    asked = f"{{{{question.strip()}}}}\n{_LINES}Answer:"
    theirs = tmp_path / "theirs"
    by_path = _their_task(
        theirs, "letters", **same, doc_to_text=asked, doc_to_choice="labels", metric_list=_METRICS[:1]
    )
    asked = "Question: {{question.strip()}}\nAnswer:"
    _their_task(theirs, "texts", **same, doc_to_text=asked, doc_to_choice="choices", metric_list=_METRICS)
    from lm_eval.models.huggingface import HFLM

    model = load(checkpoint, device="cpu", dtype="float32")
    lm = cast(Any, HFLM)(pretrained=model, tokenizer=load_tokenizer(checkpoint), batch_size=4)
    direct = _direct(lm, theirs, ["letters", "texts"])

    letter_rows = [row | {"answer": "ABCDE"[row["answer"]]} for row in rows]  # letters here, texts and indices below
    write_rows(tmp_path / "letters.jsonl", letter_rows)
    write_rows(tmp_path / "shots.jsonl", [row | {"answer": "ABCD"[row["answer"]]} for row in shots])
    write_rows(tmp_path / "texts.jsonl", [row | {"answer": row["choices"][row["answer"]]} for row in rows])
    write_rows(tmp_path / "indices.jsonl", shots)
    mine = tmp_path / "mine_letters.yaml"
    mine.write_text("kind: choice\ndata: letters.jsonl\ndemonstrations: shots.jsonl\nshots: 2\n")
    other = tmp_path / "mine_texts.yaml"
    other.write_text(
        "kind: choice\nscored: text\ndata: texts.jsonl\ndemonstrations: indices.jsonl\nshots: 2\nanswer_is: null\n"
    )
    samples = tmp_path / "samples.jsonl"
    ours = evaluate(
        checkpoint, task=(str(mine), str(other), str(by_path)), batch_size=4, dtype="float32", samples=str(samples)
    ).document["tasks"]
    assert list(ours) == ["mine_letters", "mine_texts", "letters"]
    for name, their_name, metrics in (
        ("mine_letters", "letters", ["acc,none"]),
        ("letters", "letters", ["acc,none"]),
        ("mine_texts", "texts", ["acc,none", "acc_norm,none"]),
    ):
        assert list(ours[name]["metrics"]) == metrics
        assert ours[name]["shots"] == 2
        for metric in metrics:
            assert ours[name]["metrics"][metric]["value"] == direct[their_name][metric], (name, metric)
    assert 0 < direct["texts"]["acc,none"] < 1
    head, *lines = map(json.loads, samples.read_text().splitlines())
    assert head == {"format": "moesaic-samples/1"}
    assert [line["task"] for line in lines] == ["mine_letters"] * 8 + ["mine_texts"] * 8 + ["letters"] * 8
    scores = [line["scores"]["acc"] for line in lines if line["task"] == "mine_texts"]
    assert sum(scores) / 8 == ours["mine_texts"]["score"]
    assert ours["mine_texts"]["rows"]["scores"] == scores
    assert len(lines[3]["requests"]) == 5
    assert lines[3]["requests"][0]["context"].endswith(f"E. {rows[3]['choices'][4]}\nAnswer:")
    assert lines[3]["requests"][0]["continuation"] == " A"


class _Canned:
    """Answers from a list, in place of a model."""

    def __init__(self, answers: dict[str, str]) -> None:
        from lm_eval.api.model import LM

        class Canned(LM):
            max_length, max_gen_toks = 4096, 256

            def generate_until(self, requests: Any, **_: Any) -> list[str]:
                return [next(text for question, text in answers.items() if question in one.args[0]) for one in requests]

        Canned.__abstractmethods__ = frozenset()
        self.lm = cast(Any, Canned)()


def test_numbers_in_generated_text(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import lm_eval

    answers = {"q0": " so #### 51", "q1": " 3 + 4 = 7.", "q2": " it is $1,200", "q3": " none", "q4": " 5 then 6"}
    right = ["a\n#### 51", "#### 8", "#### 1,200", "#### 0", "#### 6"]
    rows = [{"question": question, "answer": answer} for question, answer in zip(answers, right, strict=True)]
    shipped = Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml"
    config = yaml.safe_load(shipped.read_text()) | {"num_fewshot": 0, "dataset_path": "json"}
    config["dataset_kwargs"] = {"data_files": {"test": str(write_rows(tmp_path / "gsm.json", rows))}}
    for key in ("dataset_name", "tag", "training_split", "fewshot_split", "task"):
        config.pop(key)
    theirs = _their_task(tmp_path / "theirs", "theirs", **config)
    lm = _Canned(answers).lm
    direct = _direct(lm, theirs.parent, ["theirs"])["theirs"]
    monkeypatch.setattr(harness, "wrap", lambda *_, **__: lm)
    with (tmp_path / "gsm.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    mine = tmp_path / "mine.yaml"
    mine.write_text("kind: generation\nmetric: number\ndata: gsm.csv\nuntil: ['Question:']\n")
    ours = evaluate(checkpoint, task=(str(mine), str(theirs))).document["tasks"]
    assert ours["mine"]["score"] == direct["exact_match,flexible-extract"] == 3 / 5
    assert ours["mine"]["rows"]["scores"] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert ours["theirs"]["metric"] == "exact_match,strict-match"
    for metric, found in ours["theirs"]["metrics"].items():
        assert found["value"] == direct[metric]


def test_own_text_has_the_likelihood_of_the_shipped_task(checkpoint: Path, tmp_path: Path):
    texts = [{"body": "abc def", "kind": "x"}, {"body": "the quick brown", "kind": "y"}]
    write_rows(tmp_path / "mine.jsonl", texts)
    write_rows(tmp_path / "a.valid.jsonl", [{"text": one["body"], "domain": one["kind"]} for one in texts])
    (tmp_path / "own.yaml").write_text("kind: perplexity\ndata: mine.jsonl\ntext: body\ndomain: kind\n")
    mine = evaluate(checkpoint, task=(str(tmp_path / "own.yaml"),)).document["tasks"]["own"]
    theirs = evaluate(checkpoint, task=("perplexity",), data_dir=tmp_path).document["tasks"]["perplexity"]
    assert mine["text"]["domains"] == theirs["text"]["domains"]
    assert mine["rows"]["losses"] == theirs["rows"]["losses"]
