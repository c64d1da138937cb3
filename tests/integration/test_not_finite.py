"""Numbers are measured or absent: what every verb that runs a model says of one that gives NaN or infinity."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.cli.app import run
from moesaic.common.numbers import NotFiniteError
from moesaic.comparison.compare import compare
from moesaic.evaluation.evaluate import evaluate
from moesaic.modeling.finite import first_not_finite, is_finite, watched
from tests.tiny_evals import save_tiny_routed, write_evals, write_rows
from tests.tiny_training import write_documents

pytestmark = pytest.mark.filterwarnings("ignore")  # what lm-eval and its packages warn of is theirs

DAMAGED = r"layer 1, mlp\.experts gives NaN, and its own down_proj is not finite: the weights are damaged"


def change(folder: Path, part: str, value: float) -> Path:
    """Give all weights whose names have a part this value."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if part in name:
            tensors[name] = torch.full_like(tensors[name], value)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_routed(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NaN in the last matrix of the experts of layer 1."""
    folder = save_tiny_routed(tmp_path_factory.mktemp("damaged") / "model")
    for expert in range(8):
        change(folder, f"layers.1.mlp.experts.{expert}.down_proj", math.nan)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finite weights whose experts leave the range of float16, and not that of float32."""
    folder = save_tiny_routed(tmp_path_factory.mktemp("wide") / "model")
    for matrix, value in (("gate_proj", 100.0), ("up_proj", 100.0), ("down_proj", 6e4)):
        change(folder, f"layers.0.mlp.experts.3.{matrix}", value)
        change(folder, f"layers.0.mlp.experts.5.{matrix}", value)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_evals(tmp_path_factory.mktemp("data"))
    write_documents(folder / "math.jsonl", "math", number=20, seed=0)
    return folder


# --- the mechanism ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("weights", "place"),
    [
        ("embed_tokens", "embed_tokens"),
        ("layers.0.self_attn.v_proj", "layer 0, self_attn.v_proj"),
        ("layers.0.post_attention_layernorm", "layer 0, post_attention_layernorm"),
        ("layers.1.mlp.gate.weight", "layer 1, mlp.gate"),
        ("model.norm", "norm"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_first_module_is_named_with_its_weights(good: Path, weights: str, place: str, value: float):
    model = moesaic.load(good)
    for name, parameter in model.named_parameters():
        if weights in name:
            parameter.data.flatten()[:200] = value
    with watched(model) as seen:
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert seen.not_finite is not None
    assert seen.not_finite.place.endswith(place)
    assert seen.not_finite.damaged == ("weight",)


def test_a_value_out_of_range_is_told_from_damage(wide: Path):
    ids = torch.arange(3, 40)[None]
    with watched(moesaic.load(wide, dtype="float16")) as seen, torch.no_grad():
        moesaic.load(wide, dtype="float32")(input_ids=ids)
    assert seen.not_finite is None
    model = moesaic.load(wide, dtype="float16")
    with watched(model) as seen, torch.no_grad():
        model(input_ids=ids)
    assert str(seen.not_finite).startswith("layer 0, mlp.experts gives ")
    assert "in float16 for values up to " in str(seen.not_finite)
    assert str(seen.not_finite).endswith("--dtype float32 has more range")


def test_a_model_that_is_well_runs_once_with_one_look(good: Path):
    model = moesaic.load(good)
    calls = []
    model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with watched(model, refuse="it") as seen:
        assert [len(module._forward_hooks) for module in model.modules() if module._forward_hooks] == [1, 1]
        model(input_ids=torch.tensor([[3, 4, 5]]))
    assert (len(calls), seen.not_finite) == (1, None)
    assert not model._forward_hooks


def test_experts_that_are_shut_out_are_no_damage(damaged: Path):
    """A restricted router gives -inf on purpose."""
    model, selection = moesaic.load(damaged), moesaic.select(damaged, method="random", keep="3")
    with moesaic.restrict(model, selection):
        found = first_not_finite(model, lambda: model(input_ids=torch.tensor([[3, 4, 5]])))
    assert found is not None
    assert found.place == "layer 1, mlp.experts"


def test_what_is_finite():
    assert is_finite(torch.tensor([]))
    assert is_finite(torch.tensor([1, 2]))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert is_finite(torch.full((3,), torch.finfo(dtype).max, dtype=dtype))
        for value in (math.nan, math.inf, -math.inf):
            assert not is_finite(torch.tensor([1.0, value, 2.0], dtype=dtype))
    assert is_finite(torch.tensor([1.0, -math.inf]), masked=True)
    assert not is_finite(torch.tensor([math.nan, -math.inf]), masked=True)


# --- every verb -------------------------------------------------------------------------------------------------------


def test_eval_reports_no_number(damaged: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "results.json"
    result = evaluate(damaged, out, suite="piqa,gsm8k", shots=0, limit=2, data_dir=data)
    tasks = json.loads(out.read_text())["tasks"]
    said = capsys.readouterr().err
    assert set(tasks) == {"piqa", "gsm8k_cot"}
    for name, entry in tasks.items():
        assert (entry["score"], entry["standard_error"]) == (None, None)
        assert all(one == {"value": None, "standard_error": None} for one in entry["metrics"].values())
        assert "layer 1, mlp.experts gives NaN" in entry["not_finite"]
        assert f"warning: {name}: layer 1, mlp.experts gives NaN" in said
    lines = result.lines()
    assert lines[0].startswith("piqa: - acc")
    assert "layer 1, mlp.experts gives NaN" in lines[0]
    found = compare([str(out)])
    assert "has no score of piqa (layer 1, mlp.experts gives NaN" in capsys.readouterr().err
    assert all(cell is None for table in found.tables for row in table.rows for cell in row.cells)


def test_text_has_no_loss(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"text": "abc def", "domain": "a"}, {"text": "hij", "domain": "b"}]
    write_rows(tmp_path / "text.valid.jsonl", rows)
    result = evaluate(damaged, tmp_path / "out.json", suite="perplexity", data_dir=tmp_path)
    entry = json.loads((tmp_path / "out.json").read_text())["tasks"]["perplexity"]
    assert entry["score"] is None
    for row in (entry["text"]["all"], *entry["text"]["domains"].values()):
        assert (row["loss"], row["perplexity"], row["bits_per_byte"]) == (None, None, None)
    assert "perplexity of a: -, - bits per byte, loss -, 1 documents" in "\n".join(result.lines())
    assert "warning: perplexity: layer 1, mlp.experts gives NaN" in capsys.readouterr().err


def test_compare_takes_no_nan_of_older_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    losses = {"loss": 2.0, "standard_error": 0.1, "documents": 3, "tokens": 30}
    line = {
        "kind": "validation",
        "step": 1,
        "tokens": 10,
        "validation": {"a": losses, "b": losses | {"loss": math.nan}},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    found = compare([str(tmp_path)])
    assert "the last held-out loss of b is not finite" in capsys.readouterr().err
    (row,) = found.tables[0].rows
    assert row.cells[1] is None
    assert "mean" not in "\n".join(found.lines("table"))


def test_generate_is_one_line_and_status_1(damaged: Path, wide: Path, capsys: pytest.CaptureFixture[str]):
    for arguments in ([str(damaged)], [str(wide), "--dtype", "float16"], [str(damaged), "--temperature", "1"]):
        assert run(["generate", *arguments[:1], "abc abc abc abc abc abc", *arguments[1:]]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert "mlp.experts gives" in said.err
    assert run(["generate", str(wide), "abc abc abc", "--dtype", "float32", "--quiet"]) == 0


def test_verify_gives_a_dash_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from tests.tiny_models import save_tiny

    base = save_tiny(tmp_path / "base", "llama", seed=0)
    moesaic.upcycle(base, tmp_path / "moe", method="virtual_group", shards=2)
    change(tmp_path / "moe", "layers.1.mlp.experts.down_proj", math.nan)
    assert run(["verify", str(base), str(tmp_path / "moe"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (place,) = document["not_finite"]
    assert "layer 1, mlp.experts gives NaN" in place
    assert document["ok"] is False
    assert document["perplexity_target"] is None
    assert document["max_logit_difference"] is None
    assert document["layers"][1]["error"] is None
    assert document["layers"][1]["coverage"] is None
    assert document["layers"][0]["error"] < 1e-5
    assert run(["verify", str(base), str(tmp_path / "moe")]) == 1
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "inf" not in said.replace("infinity", "")
    assert "NOT FINITE: " in said


def test_verify_of_what_expand_made(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    moesaic.expand(good, tmp_path / "larger", experts=16, utility="uniform")
    change(tmp_path / "larger", "layers.1.mlp.experts.9.up_proj", math.inf)
    assert run(["verify", str(good), str(tmp_path / "larger"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["loss_target"] is document["error"] is document["loss_jump"] is None
    assert document["loss_source"] > 0
    assert len(document["not_finite"]) == 1


def test_no_expert_is_chosen_by_what_is_not_finite(damaged: Path, data: Path, tmp_path: Path):
    texts = data / "math.jsonl"
    with pytest.raises(NotFiniteError, match=DAMAGED):
        moesaic.select(damaged, tmp_path / "s.json", data=texts, keep="4")
    with pytest.raises(NotFiniteError, match=DAMAGED):
        moesaic.expand(damaged, tmp_path / "larger", experts=16, calibration=[str(texts)], sequence_length=32)
    assert not list(tmp_path.iterdir())


def test_inspect_names_what_a_router_gets(good: Path, data: Path, tmp_path: Path):
    folder = save_tiny_routed(tmp_path / "model")
    change(folder, "layers.0.self_attn.o_proj", math.inf)
    with pytest.raises(NotFiniteError, match=r"model: layer 0, self_attn\.o_proj gives .* the weights are damaged"):
        moesaic.inspect(folder, tmp_path / "looked", data=data / "math.jsonl", min_length=8, clusters=2)
    assert not (tmp_path / "looked").exists()


def test_the_check_of_an_export_fails_in_one_line(damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["export", str(damaged), str(tmp_path / "out"), "--layout", "fused", "--check", "--allow-nonfinite"]
    assert run(words) == 1
    assert "layer 1, mlp.experts gives NaN" in capsys.readouterr().err
