from typing import Any

import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.upcycling.stream import StoppedError, Target


class Recorder:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.written: list[tuple[str, int, torch.Tensor]] = []

    def write(self, name: str, values: torch.Tensor, start: int) -> None:
        self.written.append((name, start, values))


def target(code: str, *, allow_nonfinite: bool = False) -> tuple[Target, Recorder, list[float]]:
    writer, ticks = Recorder(), []
    anything: Any = writer
    made = Target(writer=anything, dtypes={"x": code}, allow_nonfinite=allow_nonfinite, tick=ticks.append)
    return made, writer, ticks


def every_16_bit_float(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 4.5, 1 / 3, 8 ** (1 / 3)])
@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_a_product_of_16_bit_floats_is_rounded_once_from_float32(dtype, code, factor):
    values = every_16_bit_float(dtype)
    made, _, _ = target(code, allow_nonfinite=True)
    expected = (values.float() * factor).to(dtype)
    assert torch.equal(made.convert(values.clone(), "x", factor), expected)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize(
    ("source", "code"), [("bfloat16", "F32"), ("float32", "BF16"), ("bfloat16", "F16"), ("float64", "F32")]
)
def test_another_dtype(source, code, factor):
    values = torch.randn(1000, dtype=torch.float64).to(getattr(torch, source))
    made, _, _ = target(code)
    wide = torch.promote_types(values.dtype, torch.float32)
    result = made.convert(values.clone(), "x", factor)
    assert torch.equal(result, (values.to(wide) * factor).to(result.dtype))


def test_nothing_is_done_where_nothing_has_to_be():
    values = torch.full((4,), float("nan"), dtype=torch.bfloat16)
    assert target("BF16")[0].convert(values, "x") is values


def test_a_value_that_float16_cannot_hold():
    values = torch.tensor([70000.0])
    with pytest.raises(MoesaicError, match="x: a value is outside the range of float16; use --dtype bfloat16"):
        target("F16")[0].put("x", 0, values)
    made, writer, _ = target("F16", allow_nonfinite=True)
    made.put("x", 0, values)
    assert writer.written[0][2].isinf().all()


def test_put_counts_the_bytes_written():
    made, writer, ticks = target("BF16")
    made.put("x", 7, torch.ones(3))
    assert ticks == [6]
    ((name, start, values),) = writer.written
    assert (name, start, values.dtype) == ("x", 7, torch.bfloat16)


def test_put_stops_when_told():
    made, writer, _ = target("F32")
    made.stop.set()
    with pytest.raises(StoppedError):
        made.put("x", 0, torch.ones(1))
    assert not writer.written
