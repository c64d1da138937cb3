"""The verb `expand`: bad input, dry runs, operators in every layout, saved utilities, the same bytes every time."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.expansion.build import expert_parts, read_expert
from moesaic.expansion.run import expand
from moesaic.families.moe import detect_moe
from tests.tiny_models import save_tiny
from tests.tiny_moes import EXPERTS, save_tiny_moe
from tests.tiny_training import save_tokenizer, write_documents


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def source(tmp_path):
    return save_tiny_moe(tmp_path / "source", "qwen3_moe")


@pytest.fixture
def text(tmp_path):
    return write_documents(tmp_path / "text.jsonl", "math", number=12, seed=0)


def weights(folder):
    return load_file(folder / "model.safetensors")


REFUSALS = [
    ({"experts": 8}, "has 8 experts already; give a larger number"),
    ({"experts": 4}, "--experts 4"),
    ({"experts": 33}, "--experts 33 needs more than --cap 3 .* the largest count possible is 32"),
    ({"experts": 17, "cap": 1}, "the largest count possible is 16"),
    ({"experts": 10, "top_k": 11}, "--top-k 11: there are 10 experts"),
    ({"experts": 10, "top_k": 0}, "top_k: must be at least 1"),
    ({"experts": 10, "utility": "approx_fisher"}, "needs the optimizer's second moments"),
    ({"experts": 10, "utility": "gradient_norm"}, "needs text"),
    ({"experts": 10, "router_op": "bias_only"}, "has no selection bias"),
    ({"experts": 10, "delta": -1.0}, "delta: must be"),
    ({"experts": 10, "calibration": ["missing.jsonl"]}, "missing.jsonl: no such file"),
    ({"experts": 10, "utility_from": "missing.json"}, "missing.json: no such file"),
    ({"experts": 10, "shard_size": "x"}, "--shard-size x"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS)
def test_bad_settings(source, tmp_path, settings, message):
    save_tokenizer(source)
    with pytest.raises(MoesaicError, match=message) as error:
        expand(source, tmp_path / "out", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_dense_model(tmp_path):
    with pytest.raises(MoesaicError, match="'llama' is not an MoE family"):
        expand(save_tiny(tmp_path / "dense", "llama"), tmp_path / "out", experts=10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 10}, "the 4 expert groups of this family must grow equally"),
        ({"experts": 12, "top_k": 7}, "--top-k 7: a token uses experts of 2 groups only, which have 6"),
    ],
)
def test_groups_of_a_family(tmp_path, settings, message):
    with pytest.raises(MoesaicError, match=message):
        expand(save_tiny_moe(tmp_path / "m", "deepseek_v3"), tmp_path / "out", **settings)


def test_an_unmatched_key(source, tmp_path):
    tensors = weights(source)
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.zeros(16, 32)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=r"experts\.8\.up_proj\.weight is there, but"):
        expand(source, tmp_path / "out", experts=10)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n', '{"text": "a"}\n'])
def test_text_without_a_usable_token(source, tmp_path, content):
    save_tokenizer(source)
    text = tmp_path / "empty.jsonl"
    text.write_text(content)
    settings = {"experts": 10, "calibration": [str(text)], "sequence_length": 2 if '"a"' in content else 32}
    if content == '{"text": "a"}\n':
        expand(source, tmp_path / "out", **settings)  # a letter and the end of the text: one token to predict
        return
    with pytest.raises(MoesaicError, match=r"empty\.jsonl"):
        expand(source, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_layer_without_any_gradient_is_named(source, tmp_path, text):
    save_tokenizer(source)
    tensors = weights(source)
    for name, values in tensors.items():
        if "layers.1.mlp.experts" in name:
            values.zero_()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MoesaicError, match=r"all experts of layer 1 are 0 \(gradient_norm\)"):
        expand(source, tmp_path / "out", experts=10, calibration=[str(text)], sequence_length=64)
    assert not (tmp_path / "out").exists()


def test_utilities_are_saved_used_again_and_refused_for_another_model(source, tmp_path, text, capsys):
    save_tokenizer(source)
    settings = {"calibration": [str(text)], "sequence_length": 64, "utility_batches": 2, "batch_size": 2}
    first = expand(source, tmp_path / "first", experts=11, **settings)
    saved = tmp_path / "first" / "utility.json"
    table = json.loads(saved.read_text())["layers"]
    assert first.copies is not None
    for layer, copies in first.copies.items():
        values = table[str(layer)]["utility"]
        assert copies[max(range(EXPERTS), key=lambda expert: values[expert])] == 3
    again = expand(source, tmp_path / "again", experts=11, utility_from=str(saved))
    assert again.copies == first.copies
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "first" / "model.safetensors"
    ).read_bytes()
    other = save_tiny_moe(tmp_path / "other", "olmoe")
    with pytest.raises(MoesaicError, match=r"utility\.json: is of a model with another config"):
        expand(other, tmp_path / "no", experts=11, utility_from=str(saved))
    record = json.loads(saved.read_text())
    for wrong in ([1.0] * 7, [-1.0] * 8, ["1"] * 8):
        record["layers"]["1"]["utility"] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(record))
        with pytest.raises(MoesaicError, match="layer 1 does not have 8 finite numbers"):
            expand(source, tmp_path / "no", experts=11, utility_from=str(tmp_path / "wrong.json"))


def test_experts_that_saw_no_token_are_reported(source, tmp_path, text):
    save_tokenizer(source)
    short = tmp_path / "short.jsonl"
    short.write_text('{"text": "a"}\n')
    result = expand(source, tmp_path / "out", experts=10, calibration=[str(short)], sequence_length=2)
    assert any("no calibration token reached expert" in line for line in result.notices)
    assert any("fills 1 of 10 batches" in line for line in result.notices)


def test_dry_runs_write_nothing(source, tmp_path, text):
    save_tokenizer(source)
    known = expand(source, tmp_path / "out", experts=10, dry_run=True)
    assert known.copies == {0: [1, 1, 0, 0, 0, 0, 0, 0], 1: [1, 1, 0, 0, 0, 0, 0, 0]}
    unknown = expand(source, tmp_path / "out", experts=10, calibration=[str(text)], dry_run=True)
    assert unknown.copies is None
    assert "copies per expert: not known before the gradients are" in unknown.lines()
    assert not (tmp_path / "out").exists()


def test_the_same_bytes_whatever_the_workers(source, tmp_path):
    for workers in (1, 4):
        expand(source, tmp_path / str(workers), experts=13, expert_op="drop", router_op="orthogonal", workers=workers)
    one, four = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("1", "4"))
    assert one == four
    expand(source, tmp_path / "seed", experts=13, expert_op="drop", router_op="orthogonal", seed=1)
    assert (tmp_path / "seed" / "model.safetensors").read_bytes() != one


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_existing_target_is_refused_before_the_model_runs(source, tmp_path, text, monkeypatch, dry_run):
    save_tokenizer(source)
    out = tmp_path / "out"
    expand(source, out, experts=9)
    before = (out / "model.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr("moesaic.expansion.utility.expert_gradients", lambda *_, **__: pytest.fail("the model ran"))
        for target in (out, source, source / "inside"):
            with pytest.raises(MoesaicError, match=r"exists|source"):
                expand(source, target, experts=10, calibration=[str(text)], dry_run=dry_run)
    expand(source, out, experts=10, calibration=[str(text)], sequence_length=64, overwrite=True)
    assert detect_moe(open_checkpoint(out)).num_experts == 10
    assert (out / "model.safetensors").read_bytes() != before


LAYOUTS = [("qwen3_moe", False), ("qwen3_moe", True), ("gpt_oss", True), ("granitemoe", False), ("mixtral", False)]


def experts_of(folder, number):
    checkpoint = open_checkpoint(folder)
    model = detect_moe(checkpoint)
    parts = expert_parts(checkpoint, model.layers[-1], number)
    return read_expert(parts, transposed=model.family.transposed, interleaved=model.family.interleaved)


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_operators_change_duplicates_and_nothing_else(tmp_path, family, fused):
    source = save_tiny_moe(tmp_path / "source", family, fused=fused)
    expand(source, tmp_path / "scaled", experts=10, expert_op="scaled_copy")
    expand(source, tmp_path / "shuffled", experts=10, expert_op="shuffle")
    for number in range(EXPERTS):
        before = experts_of(source, number)
        for made in ("scaled", "shuffled"):
            after = experts_of(tmp_path / made, number)
            assert all(torch.equal(getattr(after, name), value) for name, value in _present(before))
    for number, original in ((8, 0), (9, 1)):
        before = experts_of(source, original)
        scaled, shuffled = (experts_of(tmp_path / made, number) for made in ("scaled", "shuffled"))
        for name, value in _present(before):
            factor = 1.0 if "bias" in name else 0.95
            assert torch.equal(getattr(scaled, name), value * factor), name
        for of_shuffled, of_before in ((_fc1(shuffled), _fc1(before)), (shuffled.down_DI, before.down_DI)):
            order = [int((of_before == column[:, None]).all(0).nonzero()) for column in of_shuffled.T]
            assert sorted(order) == list(range(len(order))) != order


def _fc1(expert):
    return torch.cat([expert.gate_ID, expert.up_ID])


def _present(expert):
    return [(name, value) for name, value in vars(expert).items() if value is not None]


@pytest.mark.parametrize("fused", [False, True])
def test_operators_in_our_architecture(tmp_path, fused):
    source = save_tiny_moe(tmp_path / "source", "qwen3_moe", fused=fused)
    settings = {"experts": 10, "routing": "one_per_copy_group"}
    result = expand(source, tmp_path / "out", expert_op="scaled_copy", **settings)
    assert "--expert-op scaled_copy" in result.statement.text
    before, after = experts_of(source, 1), experts_of(tmp_path / "out", 9)
    assert all(torch.equal(getattr(after, name), value * 0.95) for name, value in _present(before))


def test_the_command_line(source, tmp_path, capsys):
    arguments = ["expand", source, tmp_path / "out", "--experts", "10", "--json", "--quiet"]
    assert cli.run([str(argument) for argument in arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["experts"], document["experts_before"], document["utility"]) == (10, 8, "uniform")
    assert document["copies"] == {"0": [1, 1, 0, 0, 0, 0, 0, 0], "1": [1, 1, 0, 0, 0, 0, 0, 0]}
    recipe = tmp_path / "out" / "recipe.yaml"
    assert cli.run(["expand", "--config", str(recipe), str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert "copies added in layer 0-1: 1 1 0 0 0 0 0 0" in out
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()
    assert cli.run(["expand", str(source), str(tmp_path / "out")]) == 2
    assert "--experts is needed" in capsys.readouterr().err


def test_a_wrong_keyword_is_called_an_argument_of_the_function(source, tmp_path):
    with pytest.raises(MoesaicError, match=r"^expand\(\): cap: "):
        expand(source, tmp_path / "out", experts=9, cap="many")
