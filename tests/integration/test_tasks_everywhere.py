"""One way to render a task: what `select`, `expand` and `inspect` read is what `eval` scores; and rows are left out."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.cli.app import run as cli
from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split, record_digest
from moesaic.evaluation.evaluate import evaluate
from moesaic.evaluation.recipe import Suite, SuiteTask
from moesaic.evaluation.requests import Request, task_requests
from moesaic.loading import load_tokenizer
from moesaic.routing.subset import load_selection
from moesaic.selection.select import select
from moesaic.training.run import train
from tests.tiny_evals import choice_rows, save_tiny_routed, write_evals, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_routed(tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_evals(tmp_path_factory.mktemp("evals"), rows=10)
    write_rows(folder / "winogrande.validation.jsonl", [r | {"question": "a _ b"} for r in choice_rows(4, choices=2)])
    (folder / "own.yaml").write_text(
        "kind: generation\ndata: gsm8k.test.jsonl\ndemonstrations: gsm8k.test.jsonl\nshots: 1\nmax_tokens: 4\n"
    )
    return folder


def test_requests_are_those_that_eval_scores(routed: Path, evals: Path, tmp_path: Path):
    tasks = ("arc_easy", "winogrande", str(evals / "own.yaml"))
    samples = tmp_path / "samples.jsonl"
    for task, shots in zip(tasks, (2, 0, 1), strict=True):
        evaluate(routed, task=(task,), shots=shots, data_dir=evals, samples=samples)
    asked: dict[str, list[str]] = {}
    for line in map(json.loads, samples.read_text().splitlines()[1:]):
        requests = line["requests"]
        if line["task"] == "own":
            text = f"{requests[0]['context']} {line['target']}"
        else:
            file = next(evals.glob(f"{line['task']}.[tv][ea][sl]*.jsonl"))
            row = json.loads(file.read_text().splitlines()[line["row"]])
            text = requests[row["answer"]]["context"] + requests[row["answer"]]["continuation"]
        asked.setdefault(line["task"], []).append(text)
    for task, shots, name in zip(tasks, (2, None, None), ("arc_easy", "winogrande", "own"), strict=True):
        found = task_requests(task, data_dir=str(evals), shots=shots)
        assert [one.text for one in found] == asked[name], name
    assert asked["arc_easy"][0].count("Question:") == 3


def test_a_selection_on_a_task_leaves_its_rows_out_wherever_they_lie(routed: Path, evals: Path, tmp_path: Path):
    made = select(routed, tmp_path / "s.json", keep=4, task="arc_easy", shots=2, split=0.4, seed=5, data_dir=str(evals))
    tokenizer = load_tokenizer(routed)
    requests = task_requests("arc_easy", data_dir=str(evals), shots=2)
    used = [one for one in requests if in_split(one.digest, share=0.4, seed=5)]
    assert 0 < len(used) < len(requests)
    assert made.details["domains"] == {"arc_easy": sum(len(tokenizer(one.text)["input_ids"]) for one in used)}
    moved = tmp_path / "elsewhere"
    shutil.copytree(evals, moved)
    rows = (moved / "arc_easy.test.jsonl").read_text().splitlines()
    others = [json.dumps(row) for row in choice_rows(2, seed=9)]
    reordered = [json.dumps(dict(reversed(json.loads(row).items()))) for row in reversed(rows)]
    (moved / "arc_easy.test.jsonl").write_text("\n".join([*others, *reordered]) + "\n")
    samples = tmp_path / "samples.jsonl"
    task = evaluate(routed, task="arc_easy", data_dir=moved, selection=tmp_path / "s.json", samples=samples).document[
        "tasks"
    ]["arc_easy"]
    assert task["samples"] == len(requests) - len(used) + 2
    assert task["identity"]["left_out"] == {"share": 0.4, "seed": 5}
    scored = {line["requests"][0]["context"] for line in map(json.loads, samples.read_text().splitlines()[1:])}
    rows_used = {one.digest for one in used}
    questions = {row["question"] for row in map(json.loads, rows) if record_digest(row) in rows_used}
    assert len(questions) == len(used)
    assert not any(question in context for question in questions for context in scored)


def test_a_selection_draws_the_same_rows_of_a_task_whatever_their_order(routed: Path, evals: Path, tmp_path: Path):
    """By content: the same of a file turned round, and those that `eval` leaves out without a selection."""
    turned = tmp_path / "turned"
    shutil.copytree(evals, turned)
    rows = (evals / "arc_easy.test.jsonl").read_text().splitlines()
    (turned / "arc_easy.test.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    digests = [
        {data[at : at + 16] for at in range(0, len(data), 16)}
        for folder in (evals, turned)
        for data in [_selected(routed, tmp_path / f"{folder.name}.json", folder)]
    ]
    assert digests[0] == digests[1]
    suite = Suite(name="mine", tasks=(SuiteTask(task="arc_easy"),), selection_share=0.4)
    left = evaluate(routed, suite=suite, data_dir=turned).document["tasks"]["arc_easy"]["samples"]
    assert left == len(rows) - len(digests[0])


def _selected(routed: Path, file: Path, folder: Path) -> str:
    made = select(routed, file, keep=4, task="arc_easy", split=0.4, data_dir=str(folder))
    return made.details["data"]["rows"]


def test_training_rows_are_asked_as_eval_asks_with_other_rows_as_demonstrations(evals: Path):
    found = task_requests("arc_easy", data_dir=str(evals), shots=2, training=True)
    rows = [json.loads(line) for line in (evals / "arc_easy.train.jsonl").read_text().splitlines()]
    evaluated = task_requests("arc_easy", data_dir=str(evals), shots=0)
    alone = task_requests("arc_easy", data_dir=str(evals), shots=0, training=True)
    assert len(found) == len(rows)
    assert not {one.digest for one in found} & {one.digest for one in evaluated}
    for request, short, row in zip(found, alone, rows, strict=True):
        assert short.prompt == f"Question: {row['question']}\nAnswer:"
        assert request.answer == short.answer == f" {row['choices'][row['answer']]}"
        assert request.prompt.endswith(short.prompt)
        assert request.prompt.count(short.prompt) == 1
        assert request.prompt.count("Question:") == 3
    with pytest.raises(MoesaicError, match="--task perplexity: has texts and no questions"):
        task_requests("perplexity", data_dir=str(evals), shots=0, training=True)
    with pytest.raises(MoesaicError, match=r"--task gsm8k_cot: has no training rows; give `demonstrations`"):
        task_requests("gsm8k_cot", data_dir=str(evals), shots=0, training=True)


def test_fine_tuning_on_a_task_is_the_loss_of_its_answers(routed: Path, evals: Path, tmp_path: Path):
    """One example a row, 8 a step: its loss is the mean over the answers' tokens and the end token."""
    recipe = {
        "model": str(routed),
        "data": {
            "sequence_length": 256,
            "packing": False,
            "epochs": 1,
            "sources": [{"task": "arc_easy", "data_dir": str(evals), "shots": 1}],
            "validation": [{"task": "arc_easy", "data_dir": str(evals), "split": 0.4, "domain": "left"}],
        },
        "optimizer": {"lr": 1e-9},
        "batch": {"tokens": 8 * 256, "micro_sequences": 4},
        "precision": "fp32",
        "seed": 3,
    }
    train(recipe, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    model = AutoModelForCausalLM.from_pretrained(routed, dtype=torch.float64, experts_implementation="eager")
    tokenizer = load_tokenizer(routed)

    def naive(requests: list[Request]) -> float:
        total, number = 0.0, 0
        for one in requests:
            before = len(tokenizer(one.prompt)["input_ids"])
            ids = [*tokenizer(one.text)["input_ids"], tokenizer.eos_token_id]
            logs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            total -= sum(float(logs[n - 1, ids[n]]) for n in range(before, len(ids)))
            number += len(ids) - before
        return total / number

    trained = task_requests("arc_easy", data_dir=str(evals), shots=1, training=True)
    assert losses == pytest.approx([naive(trained)], rel=1e-5)
    held_out = next(line for line in lines if line["kind"] == "validation")["validation"]["left"]
    asked = task_requests("arc_easy", data_dir=str(evals), shots=0)
    left = [one for one in asked if not in_split(one.digest, share=0.4, seed=0)]
    assert 0 < len(left) < len(asked)
    assert held_out["loss"] == pytest.approx(naive(left), rel=1e-5)


def test_a_dry_run_and_a_run_say_what_is_wrong_with_a_task(routed: Path, evals: Path, tmp_path: Path, capsys):
    (evals / "alone.yaml").write_text("kind: generation\ndata: gsm8k.test.jsonl\n")
    data = {"sequence_length": 64, "packing": False, "epochs": 1}
    cases = {
        "no such task; did you mean 'arc_easy'": {"task": "arc_eazy"},
        "no piqa.train.jsonl": {"task": "piqa", "data_dir": str(evals)},
        "has no training rows": {"task": str(evals / "alone.yaml")},
    }
    recipe = {"model": str(routed), "optimizer": {"lr": 0.1}, "batch": {"tokens": 64}, "precision": "fp32"}
    for words, source in cases.items():
        (tmp_path / "r.yaml").write_text(json.dumps(recipe | {"data": data | {"sources": [source]}}))
        for more in (["--dry-run"], []):
            assert cli(["train", str(tmp_path / "r.yaml"), str(tmp_path / "out"), *more]) == 2
            said = capsys.readouterr().err
            assert "data.sources.0" in said
            assert words in said
    longer = {"task": "arc_easy", "data_dir": str(evals), "shots": 4}
    with pytest.raises(MoesaicError, match=r"arc_easy: 8 of 8 documents are longer than data.sequence_length \(64\)"):
        train(recipe | {"data": data | {"sources": [longer]}}, tmp_path / "out")


def test_a_selection_that_cannot_say_its_rows_is_named(
    routed: Path, evals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    data = str(evals / "arc_easy.test.jsonl")
    select(routed, tmp_path / "a.json", keep=4, data=data, split=0.4, stats_out=str(tmp_path / "st.json"))
    select(routed, tmp_path / "b.json", keep=4, stats=(str(tmp_path / "st.json"),))
    select(routed, tmp_path / "c.json", keep=4, method="random")

    def said(name: str) -> str:
        evaluate(routed, task="arc_easy", data_dir=evals, limit=1, selection=tmp_path / name, dry_run=True)
        return capsys.readouterr().err

    assert said("a.json") == ""
    assert "b.json: does not say which rows it was made on" in said("b.json")
    assert said("c.json") == ""
    document = json.loads((tmp_path / "a.json").read_text())
    del document["details"]["data"]["rows"]  # a file of an earlier version
    (tmp_path / "old.json").write_text(json.dumps(document))
    assert "old.json: does not say which rows it was made on" in said("old.json")


def test_task_files_of_one_name_are_two_domains(routed: Path, evals: Path, tmp_path: Path):
    for folder, question in (("one", "a b"), ("two", "c d e f")):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "rows.jsonl", [{"question": question, "answer": "a"}])
        (tmp_path / folder / "mine.yaml").write_text("kind: generation\ndata: rows.jsonl\n")
    files = [str(tmp_path / folder / "mine.yaml") for folder in ("one", "two")]
    made = select(routed, tmp_path / "s.json", keep=4, task=tuple(files))
    assert set(made.details["domains"]) == {f"mine ({file})" for file in files}


def test_data_sets_are_domains_of_the_same_weight(routed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for folder, texts in (("one", ["abc abd " * 20] * 40), ("two", ["dcb"])):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "text.jsonl", [{"text": text} for text in texts])
    paths = [str(tmp_path / folder / "text.jsonl") for folder in ("one", "two")]
    both = select(routed, tmp_path / "s.json", keep=4, data=tuple(paths), quiet=False)
    names = [f"text ({path})" for path in paths]
    assert set(both.details["domains"]) == set(names)
    assert (
        f"{names[1]}: only 3 tokens, the largest domain has 6,400; domains are weighted alike"
        in capsys.readouterr().err
    )
    alone = [select(routed, keep=4, data=path) for path in paths]
    for layer, row in enumerate(both.scores):
        shares = [[score / sum(one.scores[layer]) for score in one.scores[layer]] for one in alone]
        assert row == pytest.approx([sum(pair) for pair in zip(*shares, strict=True)], rel=1e-5)
    assert load_selection(tmp_path / "s.json") == both
    files = [str(tmp_path / f"{number}.stats") for number in range(2)]
    for path, file in zip(paths, files, strict=True):
        select(routed, keep=4, data=path, stats_out=file)
    assert set(select(routed, keep=4, stats=tuple(files)).details["domains"]) == set(names)
    with pytest.raises(MoesaicError, match=r"--stats-out .*: holds one domain"):
        select(routed, keep=4, data=tuple(paths), stats_out=str(tmp_path / "x"))


def test_expand_and_inspect_take_tasks(routed: Path, evals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seen = moesaic.inspect(
        routed, tmp_path / "seen", data=("arc_easy", str(evals / "own.yaml")), data_dir=str(evals), shots=1,
        min_length=1, clusters=2,
    )  # fmt: skip
    assert [domain.name for domain in seen.data.domains] == ["arc_easy", "own"]
    few = write_rows(tmp_path / "few.jsonl", [{"text": "abc"}])
    moesaic.expand(
        routed, tmp_path / "large", experts=10, calibration=("arc_easy", str(few)), data_dir=str(evals), shots=1,
        utility_batches=2, batch_size=2, sequence_length=32, quiet=False,
    )  # fmt: skip
    said = capsys.readouterr().err
    assert "--calibration arc_easy: 64 tokens" in said
    assert f"--calibration {few}: 64 tokens" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "arc_esy"}, "arc_esy: no such task; did you mean 'arc_easy'"),
        ({"task": "copa"}, "--task copa: no copa.validation.jsonl in "),
        ({"task": "perplexity"}, "--task perplexity: has texts and no questions"),
        ({"task": "arc_easy", "template": "{question}"}, "--task arc_easy: .*leave --template out"),
        (
            {"task": "arc_easy", "data": "x.jsonl", "domain": "d"},
            "--domain d: names one",
        ),
    ],
)
def test_refusals(routed: Path, evals: Path, options: dict, message: str):
    with pytest.raises(MoesaicError, match=message):
        select(routed, keep=4, data_dir=str(evals), **options)
