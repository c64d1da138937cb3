"""`plan` of a config.json alone: published sizes, bytes of quantised ones, and refusals before a model is built."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.planning.recipe import PlanReport
from moesaic.planning.run import plan
from tests.tiny_moes import save_tiny_moe
from tests.tiny_quantised import FAMILIES, tiny_quantised
from tests.unit.planning.published import PUBLISHED


def planned(source: Path, **options: Any) -> PlanReport:
    report = plan(source, **options)
    assert isinstance(report, PlanReport)
    return report


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


def agrees(count: int, published: str) -> bool:
    """Rounded or cut to the digits that are printed, in billions."""
    figure = Decimal(published)
    unit = Decimal(1).scaleb(int(figure.as_tuple().exponent))
    return -unit / 2 <= Decimal(count) / 10**9 - figure < unit


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    count = planned(config_file(tmp_path, published.config)).parameters
    lookup = published.config["vocab_size"] * published.config["hidden_size"]
    active = {
        "all": count.active,
        "without lookup": count.active - lookup,
        "without embeddings": count.active_without_embeddings,
    }
    assert agrees(count.total, published.total), (published.source, count.total)
    assert agrees(active[published.counts], published.active), (published.source, active)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_config_alone_says_what_the_files_say(kind: str, tmp_path: Path) -> None:
    folder = tiny_quantised(tmp_path / "q", kind)
    files, alone = planned(folder), planned(folder / "config.json")
    shapes = sum(8 for name in files_of(folder) if name.endswith("_shape"))
    assert alone.weight_bytes == files.weight_bytes - shapes
    for name in ("parameters", "flops_per_token", "kv_cache_bytes", "kv_cache_bytes_per_further_token"):
        assert getattr(alone, name) == getattr(files, name), name
    assert any("is quantised" in note for note in alone.notes)


def files_of(folder: Path) -> list[str]:
    with (folder / "model.safetensors").open("rb") as stream:
        return list(json.loads(stream.read(int.from_bytes(stream.read(8), "little"))))


def test_cache_per_token_by_hand(tmp_path: Path) -> None:
    latent = planned(config_file(tmp_path, PUBLISHED["DeepSeek-V3"].config))
    assert latent.kv_cache_bytes_per_token == 61 * (512 + 64) * 2
    windows = planned(config_file(tmp_path, PUBLISHED["gpt-oss-20b"].config), context=1000)
    assert windows.kv_cache_bytes_per_token == 24 * 2 * 8 * 64 * 2
    assert windows.kv_cache_bytes_per_further_token == 12 * 2 * 8 * 64 * 2
    assert windows.kv_cache_bytes == 12 * 2 * 8 * 64 * 2 * (1000 + 128)


def test_linear_attention_has_no_cache_that_grows(tmp_path: Path) -> None:
    config = {"model_type": "kimi_linear", "num_hidden_layers": 4, "hidden_size": 64, "pad_token_id": 0}
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    report = planned(config_file(tmp_path, {**config, "layer_types": kinds}))
    one = planned(config_file(tmp_path, {**config, "layer_types": ["full_attention"] * 4}))
    assert report.kv_cache_bytes_per_token * 4 == one.kv_cache_bytes_per_token > 0
    assert any("3 of 4 layers have no key/value cache" in note for note in report.notes)


def test_devices_by_hand(tmp_path: Path) -> None:
    file = config_file(tmp_path, PUBLISHED["Mixtral-8x7B"].config)
    report = planned(file, gpu="H200", mfu=0.5, price=3)
    serving = report.serving
    assert serving is not None
    assert report.weight_bytes == 2 * report.parameters.total
    assert serving.devices == 1
    speed = 989e12 * 0.5 / report.flops_per_token
    assert serving.tokens_per_second_per_device == pytest.approx(speed, rel=1e-12)
    assert serving.price_per_million_tokens == pytest.approx(3 / 3600 / speed * 1e6, rel=1e-12)
    assert "fits on one H200" in "\n".join(report.lines())
    smaller = planned(file, gpu="L40S")
    assert smaller.serving is not None
    assert smaller.serving.devices == 3  # 93.9 GB over 0.9 * 48 GB
    assert "does not fit on one L40S" in "\n".join(smaller.lines())


def test_a_derived_family_and_a_dense_one(tmp_path: Path) -> None:
    folder = save_tiny_moe(tmp_path / "moe", "glm4_moe")
    assert planned(folder / "config.json").parameters == planned(folder).parameters
    dense = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    report = planned(config_file(tmp_path, {**dense, "vocab_size": 64, "intermediate_size": 48}))
    assert report.parameters.total == 64 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**6}, "no machine holds more than"),
        ({"hidden_size": 2**19, "moe_intermediate_size": 2**22, "num_experts": 2**14}, "no machine holds"),
        ({"model_type": "no_such_model"}, "unknown to transformers"),
        ({"num_experts": "many"}, "transformers cannot use a value"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised \\(awq\\)"),
    ],
)
def test_refusals(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = {**PUBLISHED["Qwen3-30B-A3B"].config, **change}
    with pytest.raises(MoesaicError, match=words) as caught:
        plan(config_file(tmp_path, config))
    assert "\n" not in str(caught.value)
    with pytest.raises(MoesaicError, match="no such file"):
        plan(tmp_path / "other.json")
    with pytest.raises(MoesaicError, match="mfu: must be above 0"):
        plan(tmp_path, mfu=0)
