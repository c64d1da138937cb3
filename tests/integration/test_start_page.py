"""The page that a new user starts with: its code, block by block, on a tiny model in place of the hub's."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from moesaic.cli import app as cli
from moesaic.loading import load
from tests.tiny_evals import save_tiny_dense
from tests.tiny_training import write_documents

PAGE = (Path(__file__).parents[2] / "docs/start.md").read_text(encoding="utf-8")
BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_its_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_dense(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(TEMPLATE)
    write_documents(tmp_path / "text.jsonl", "math", number=40, seed=0)
    commands = [line for block in blocks("") for line in block.splitlines() if line.startswith("moesaic ")]
    assert [command.split()[1] for command in commands] == ["upcycle", "verify", "inspect", "report"]
    serve, tune = blocks("python")

    def call(command):
        words = [str(tmp_path / "base") if word == BASE else word for word in shlex.split(command)[1:]]
        assert cli.run([*words, "--quiet"]) == 0, command

    for command in commands[:2]:
        call(command)
    exec(serve, {})
    assert capsys.readouterr().out.strip(), "the model says nothing"
    exec(tune, {})
    assert isinstance(load("tuned"), PreTrainedModel)
    for command in commands[2:]:
        call(f"{command} --clusters 4" if "inspect" in command else command)
    assert (tmp_path / "report.html").exists()
