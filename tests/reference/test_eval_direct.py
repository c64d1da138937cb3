"""`moesaic eval` gives the numbers of lm-eval called directly: its own tasks by YAML, on rows in the hub's form."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml

from moesaic.evaluation import perplexity
from moesaic.evaluation.evaluate import evaluate
from moesaic.loading import load, load_tokenizer
from tests.tiny_evals import naive_document_loss, save_tiny_dense, write_evals, write_rows

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs


def _hub_rows(folder: Path, local: Path) -> dict[str, dict[str, str]]:
    """The rows as the hub has them, written by hand here, for YAML tasks that read JSON files."""
    import json

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (local / name).read_text().splitlines()]

    def arc(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "question": row["question"],
            "choices": {"text": row["choices"], "label": ["A", "B", "C", "D"]},
            "answerKey": "ABCD"[row["answer"]],
        }

    files = {
        "arc_easy": {
            "test": [arc(row) for row in read("arc_easy.test.jsonl")],
            "train": [arc(row) for row in read("arc_easy.train.jsonl")],
        },
        "piqa": {
            "validation": [
                {"goal": row["question"], "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["answer"]}
                for row in read("piqa.validation.jsonl")
            ]
        },
        "boolq": {
            "validation": [
                {"passage": row["context"], "question": row["question"], "label": 1 - row["answer"]}
                for row in read("boolq.validation.jsonl")
            ]
        },
        "gsm8k": {"test": [{"question": r["question"], "answer": r["answer"]} for r in read("gsm8k.test.jsonl")]},
    }
    return {
        task: {split: str(write_rows(folder / f"{task}.{split}.json", rows)) for split, rows in splits.items()}
        for task, splits in files.items()
    }


def _direct(checkpoint: Path, folder: Path, local: Path, shots: dict[str, int]) -> dict[str, Any]:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    shipped = Path(lm_eval.__file__).parent / "tasks"
    sources = {
        "arc_easy": "arc/arc_easy.yaml",
        "piqa": "piqa/piqa.yaml",
        "boolq": "super_glue/boolq/default.yaml",
        "gsm8k": "gsm8k/gsm8k.yaml",
    }
    folder.mkdir()
    for task, files in _hub_rows(folder, local).items():
        config = yaml.safe_load((shipped / sources[task]).read_text())
        for split in ("training_split", "validation_split", "test_split", "fewshot_split"):
            if config.get(split) not in files:
                config.pop(split, None)
        config |= {"dataset_path": "json", "dataset_kwargs": {"data_files": files}, "num_fewshot": shots[task]}
        config.pop("dataset_name", None)
        config.pop("tag", None)
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(config))
    model = load(checkpoint, device="cpu", dtype="float32")
    make, run = cast(Any, HFLM), cast(Any, lm_eval.simple_evaluate)  # decorators hide their signatures
    results = run(
        model=make(pretrained=model, tokenizer=load_tokenizer(checkpoint), batch_size=4),
        tasks=list(shots),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        limit=5,
    )
    return results["results"]


def test_the_numbers_of_lm_eval_called_directly(tmp_path: Path):
    from moesaic.evaluation.recipe import Suite, SuiteTask

    checkpoint, local = save_tiny_dense(tmp_path / "model"), write_evals(tmp_path / "evals")
    shots = {"arc_easy": 2, "piqa": 0, "boolq": 0, "gsm8k": 0}
    direct = _direct(checkpoint, tmp_path / "direct", local, shots)
    suite = Suite(name="mine", tasks=tuple(SuiteTask(task=name, shots=number) for name, number in shots.items()))
    ours = evaluate(checkpoint, suite=suite, data_dir=local, limit=5, batch_size=4, dtype="float32").document["tasks"]
    compared = 0
    for task in shots:
        for metric, found in ours[task]["metrics"].items():
            name, _, filter_name = metric.partition(",")
            assert found["value"] == direct[task][metric], (task, metric)
            assert found["standard_error"] == direct[task][f"{name}_stderr,{filter_name}"], (task, metric)
            compared += 1
        assert ours[task]["samples"] == 5
    assert compared == 2 + 2 + 1 + 2  # acc and acc_norm of two, acc of BoolQ, two filters of GSM8K
    assert 0 < sum(ours[task]["score"] for task in ("arc_easy", "piqa", "boolq")) < 3


@pytest.mark.parametrize("window", [7, 64])
def test_loss_of_documents_against_a_forward_pass_each(tmp_path: Path, window: int):
    checkpoint = save_tiny_dense(tmp_path)
    texts = ["abc de", "a", "the quick brown fox jumps over the lazy dog", "0123 4567"]
    model, tokenizer = load(checkpoint, device="cpu", dtype=torch.float64), load_tokenizer(checkpoint)
    losses_N, tokens_N = perplexity.document_losses(model, tokenizer, texts, batch_size=3, window=window)
    for number, text in enumerate(texts):
        loss, tokens = naive_document_loss(checkpoint, text, window)
        assert losses_N[number].item() == pytest.approx(loss, rel=1e-10)
        assert tokens_N[number] == tokens == len(text)


def test_loss_of_a_document_is_lm_evals_rolling_likelihood(tmp_path: Path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    checkpoint = save_tiny_dense(tmp_path)
    model, tokenizer = load(checkpoint, device="cpu", dtype="float32"), load_tokenizer(checkpoint)
    texts = ["abc de", "the quick brown fox jumps over the lazy dog"]
    lm = cast(Any, HFLM)(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=16)
    instances = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=number)
        for number, text in enumerate(texts)
    ]
    direct = lm.loglikelihood_rolling(instances)
    losses_N, _ = perplexity.document_losses(model, tokenizer, texts, batch_size=2, window=16)
    assert losses_N.tolist() == pytest.approx([-value for value in direct], rel=1e-5)
