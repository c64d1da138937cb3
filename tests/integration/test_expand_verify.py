"""`verify` of expanded checkpoints: promises that hold or do not, and the jump where nothing is promised."""

import json

import pytest
from safetensors.torch import load_file, save_file

from moesaic import expand, verify
from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.verifying.recipe import ExpandedReport
from tests.tiny_moes import save_tiny_moe


@pytest.fixture
def source(tmp_path):
    return save_tiny_moe(tmp_path / "source", "mixtral")


def report_of(source, target):
    report = verify(source, target, quiet=True)
    assert isinstance(report, ExpandedReport)
    return report


def test_exact_statements_hold(source, tmp_path):
    expand(source, tmp_path / "out", experts=13, routing="one_per_copy_group", delta=0)
    report = report_of(source, tmp_path / "out")
    assert (report.code, report.ok, len(report.checks)) == ("E2", True, 1)
    assert report.error < 1e-5
    assert abs(report.loss_jump) < 1e-5


def test_a_changed_expert_is_found(source, tmp_path):
    expand(source, tmp_path / "out", experts=16, top_k=4, delta=0)
    assert report_of(source, tmp_path / "out").ok
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "layers.1" in name and "experts.9.w2" in name)
    tensors[name] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    report = report_of(source, tmp_path / "out")
    assert not report.ok
    assert cli.run(["verify", str(source), str(tmp_path / "out"), "--quiet"]) == 1


def test_the_jump_of_plain_routing_is_measured(source, tmp_path, capsys):
    expand(source, tmp_path / "out", experts=16)
    assert cli.run(["verify", str(source), str(tmp_path / "out"), "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["code"] == "none"
    assert document["error"] > 0.01
    assert document["loss_jump"] == pytest.approx(document["loss_target"] - document["loss_source"])
    assert any("jump" in line and "nats per token" in line for line in report_of(source, tmp_path / "out").lines())


def test_another_source_is_noted_or_refused(source, tmp_path):
    expand(source, tmp_path / "out", experts=10)
    other = save_tiny_moe(tmp_path / "other", "mixtral", seed=1)
    assert "are not those" in report_of(other, tmp_path / "out").notes[0]
    other = save_tiny_moe(tmp_path / "wider", "mixtral", vocab_size=100)
    with pytest.raises(MoesaicError, match="another vocabulary"):
        verify(other, tmp_path / "out", quiet=True)
