"""Every example of `--help` does what it says, on small models under the names that it uses.

Where a verb has --dry-run it is given: everything is then read and checked, and nothing has to be computed.
"""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

import moesaic
from moesaic.analysis.format import write_inspection
from moesaic.cli import app as cli
from moesaic.cli.listings import FAMILIES_HELP
from moesaic.cli.verbs import COMMANDS
from tests.tiny_emo import save_tiny_emo
from tests.tiny_evals import choice_rows, save_tiny_dense, save_tiny_routed, write_evals, write_rows
from tests.tiny_inspection import tiny_inspection
from tests.tiny_report import write_results, write_run
from tests.tiny_training import tiny_recipe, write_documents

ELSEWHERE = {"torchrun": "tests/distributed", "--llama-cpp": "interop/llama_cpp_parity.py"}
"""What only some examples need -> where it is tried."""


def examples_of(text: str) -> list[str]:
    """The command lines of a help text; one that goes on in the next line is one."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.strip() for line in lines if re.match(r"\s+(moesaic|torchrun) ", line)]


TEXTS = {name: command.examples for name, command in COMMANDS.items()} | {"families": FAMILIES_HELP["help_epilogue"]}
EXAMPLES = [line for text in TEXTS.values() for line in examples_of(text)]
HERE = [line for line in EXAMPLES if not any(word in line for word in ELSEWHERE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Everything that the examples read."""
    root = tmp_path_factory.mktemp("examples")
    for name in ("base", "math", "code", "Qwen/Qwen3-1.7B-Base"):
        save_tiny_dense(root / name)
    moesaic.upcycle(root / "base", root / "moe", method="sparse", experts=40, top_k=2)
    for seed, name in enumerate(("emo", "baseline")):
        save_tiny_routed(root / name, seed=seed)
    (root / "allenai").mkdir()
    save_tiny_emo(root / "allenai" / "Emo_1b14b_1T")
    write_evals(root / "evals")
    shutil.copy(root / "evals" / "gsm8k.test.jsonl", root / "evals" / "gsm8k.train.jsonl")
    (root / "corpus").mkdir()
    for domain in ("math", "code"):
        write_documents(root / f"{domain}.jsonl", domain, number=40, seed=0)
        rows = [{"text": line, "domain": domain} for line in (root / f"{domain}.jsonl").read_text().splitlines()]
        write_rows(root / "corpus" / f"{domain}.valid.jsonl", rows)
    (mmlu,) = (root / "evals").glob("mmlu.test*.jsonl")
    shutil.copy(root / "math.jsonl", root / "texts.jsonl")
    shutil.copy(root / "moe" / "config.json", root)
    (root / "notes.txt").write_text("some notes " * 40)
    subjects = ("college_computer_science", "electrical_engineering", "high_school_geography", "abstract_algebra")
    write_rows(
        root / "mmlu.jsonl",
        [row for subject in subjects for row in choice_rows(60, seed=3, subject=subject)],
    )
    write_rows(root / "rows.jsonl", choice_rows(4))
    (root / "mine.yaml").write_text("kind: choice\ndata: rows.jsonl\n")
    (root / "recipe.yaml").write_text(json.dumps(tiny_recipe(root / "in", budget={"steps": 500})))
    for seed, name in enumerate(("inspected", "emo-inspected", "baseline-inspected")):
        (root / name).mkdir()
        write_inspection(tiny_inspection(name=f"./{name}", seed=seed), root / name)
    for name in ("emo-s0", "emo-s1", "std-s0", "std-s1", "e", "up", "me"):
        write_run(root / "runs" / name)
    for name in ("emo", "baseline"):
        write_run(root / "logs" / name)
        shutil.copy(root / "logs" / name / "metrics.jsonl", root / name)
    for name in ("results", "emo.results", "standard.results"):
        write_results(root / f"{name}.json", name=f"./{name}", weights=name.ljust(32, "x"))
    moesaic.expand(root / "moe", root / "earlier", experts=64, utility="weight_norm")
    for domain in ("math", "code"):
        given = {"data": str(root / f"{domain}.jsonl"), "stats_out": str(root / f"{domain}.stats.json")}
        moesaic.select(root / "moe", root / f"{domain}.json", keep="25%", **given)
    by = ["--by", "mmlu_category", "--split", "0.4", "--keep", "25%", "--quiet"]
    assert cli.run(["select", str(root / "moe"), str(root / "selections"), "--data", str(mmlu), *by]) == 0
    moesaic.extract(root / "moe", root / "math.json", root / "math-experts-tuned")
    return root


def test_the_examples_that_are_tried_elsewhere_are_few():
    assert len(EXAMPLES) - len(HERE) == len(ELSEWHERE)
    assert all((Path(__file__).parents[2] / place).exists() for place in ELSEWHERE.values())


@pytest.mark.parametrize("line", HERE)
def test_an_example_runs(folder, line, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    _, verb, *words = shlex.split(line)
    options = COMMANDS[verb].run_options if verb in COMMANDS else ()
    flags = [flag for flag in ("dry_run", "overwrite") if flag in options and not {"--list", "--check"} & set(words)]
    status = cli.run([verb, *words, *(f"--{flag.replace('_', '-')}" for flag in flags)])
    assert status == 0, capsys.readouterr().err
