"""One way to render a task: what `select`, `expand` and `inspect` read is what `eval` scores; and rows are left out."""

import json
import shutil
from pathlib import Path

import pytest

import moesaic
from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split
from moesaic.evaluation.evaluate import evaluate
from moesaic.evaluation.requests import task_requests
from moesaic.loading import load_tokenizer
from moesaic.routing.subset import load_selection
from moesaic.selection.select import select
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
    used = [one for one in requests if in_split(one.number, share=0.4, seed=5)]
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
    questions = {json.loads(rows[one.number])["question"] for one in used}
    assert not any(question in context for question in questions for context in scored)


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
    with pytest.raises(MoesaicError, match=r"stats_out .*: holds one domain"):
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
        ({"task": "copa"}, "task copa: no copa.validation.jsonl in "),
        ({"task": "perplexity"}, "task perplexity: has texts and no questions"),
        ({"task": "arc_easy", "template": "{question}"}, "task arc_easy: .*leave template out"),
        (
            {"task": "arc_easy", "data": "x.jsonl", "domain": "d"},
            "domain d: names one",
        ),
    ],
)
def test_refusals(routed: Path, evals: Path, options: dict, message: str):
    with pytest.raises(MoesaicError, match=message):
        select(routed, keep=4, data_dir=str(evals), **options)
