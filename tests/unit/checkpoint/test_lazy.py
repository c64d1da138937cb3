"""The algebra of lazy tensors: every operation gives what torch gives on the tensors in memory, in every dtype."""

import subprocess
import sys

import pytest
import torch

from moesaic.checkpoint import lazy, streaming
from moesaic.checkpoint.lazy import Lazy, combine, computed, concat, mean, stack, stored, together
from moesaic.checkpoint.reader import DTYPE_CODES
from moesaic.checkpoint.source import open_checkpoint
from moesaic.checkpoint.streaming import torch_dtype, units
from moesaic.common import seeds
from tests.tiny_files import checkpoint_folder

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def tensors():
    return {
        "w": torch.randn(6, 4, dtype=torch.float64),
        "v": torch.randn(6, 4, dtype=torch.float64),
        "b": torch.randn(6).bfloat16(),
        "e": torch.randn(3, 4, 2).bfloat16(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3),
        "f": torch.randn(5, 7).half(),
    }


@pytest.fixture
def files(tmp_path, tensors):
    return open_checkpoint(checkpoint_folder(tmp_path / "source", {"model.safetensors": tensors})).tensors


@pytest.fixture(params=[None, 16], ids=["large blocks", "blocks of 16 bytes"])
def blocks(request, monkeypatch):
    if request.param:
        for module, name in ((streaming, "COPY_BYTES"), (streaming, "BLOCK_BYTES"), (lazy, "_MEAN_BYTES")):
            monkeypatch.setattr(module, name, request.param)


def same(one: Lazy, expected: torch.Tensor) -> None:
    assert one.shape == tuple(expected.shape)
    assert one.dtype == DTYPE_CODES[expected.dtype]
    assert torch.equal(one.read(), expected)
    assert torch.equal(streamed(one), expected)


def streamed(one: Lazy) -> torch.Tensor:
    """As the writer gets it: every element exactly once, whatever the blocks."""
    values = torch.empty(one.size, dtype=torch_dtype(one.dtype))
    filled = torch.zeros(one.size, dtype=torch.int)

    def put(name, start, block):
        part = block if isinstance(block, torch.Tensor) else torch.frombuffer(bytearray(block), dtype=values.dtype)
        assert part.is_contiguous()
        assert part.dtype == values.dtype
        values[start : start + part.numel()] = part.view(-1)
        filled[start : start + part.numel()] += 1

    for unit in units([("x", one.dtype, one.pieces)]):
        unit.run(put)
    assert (filled == 1).all()
    return values.view(one.shape)


@pytest.mark.parametrize("name", ["w", "b", "e", "scalar", "empty", "f"])
def test_stored(blocks, files, tensors, name):
    same(stored(files[name]), tensors[name])
    assert stored(files[name]).sources == (files[name],)
    assert stored(files[name]).begins_with is files[name]


def test_rows_columns_and_slots(blocks, files, tensors):
    w, e = stored(files["w"]), stored(files["e"])
    same(w.rows(1, 4), tensors["w"][1:4])
    same(w.rows(2, 2), tensors["w"][2:2])
    same(w.columns(1, 3), tensors["w"][:, 1:3])
    same(w.rows(1, 5).columns(0, 1), tensors["w"][1:5, :1])
    same(w.columns(1, 3).rows(2, 5), tensors["w"][2:5, 1:3])
    same(e.index(1).columns(1, 2), tensors["e"][1, :, 1:])
    same(e.index(2).rows(0, 2), tensors["e"][2, :2])
    same(w.narrow(-2, 1, 2), tensors["w"].narrow(-2, 1, 2))
    same(stored(files["b"]).narrow(-1, 2, 3), tensors["b"].narrow(-1, 2, 3))
    same(w.reshape(3, 8), tensors["w"].reshape(3, 8))
    assert w.columns(0, 4) is w


@pytest.mark.parametrize(("axis", "slots"), [(0, [2, 0, 0]), (1, [3, 1, 1]), (2, [1]), (2, [1, 0])])
def test_take_is_index_select(blocks, files, tensors, axis, slots):
    same(stored(files["e"]).take(slots, axis), tensors["e"].index_select(axis, torch.tensor(slots)))


def test_concat_and_stack(blocks, files, tensors):
    w, v = stored(files["w"]), stored(files["v"])
    same(concat([w, v.rows(1, 3), w]), torch.cat([tensors["w"], tensors["v"][1:3], tensors["w"]]))
    same(concat([w, v, w], axis=-1), torch.cat([tensors["w"], tensors["v"], tensors["w"]], dim=1))
    same(stack([w, v]), torch.stack([tensors["w"], tensors["v"]]))
    same(stack([w.columns(0, 2), v.columns(2, 4)]), torch.stack([tensors["w"][:, :2], tensors["v"][:, 2:]]))
    assert stack([w, v]).begins_with is files["w"]


def test_neighbours_are_one_piece(files):
    e = stored(files["e"])
    assert len(stack([e.index(0), e.index(1), e.index(2), e.index(0)]).pieces) == 2
    assert stack([e.index(i) for i in range(3)]).begins_with is files["e"]
    assert concat([e.rows(0, 1) * 2.0, e.rows(1, 3) * 2.0]).pieces == (e * 2.0).pieces


@pytest.mark.parametrize("target", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_factors_and_casts_round_once(blocks, tmp_path, source, target):
    values = torch.randn(5, 8, dtype=torch.float64).to(source)
    folder = checkpoint_folder(tmp_path / "one", {"model.safetensors": {"x": values}})
    x = stored(open_checkpoint(folder).tensors["x"])
    wide = torch.promote_types(source, target)
    code = lazy.promoted(x.dtype, DTYPE_CODES[target])
    assert torch_dtype(code) == wide
    expected = (values.to(torch.promote_types(wide, torch.float32)) * 3.7).to(wide).to(target)
    same((x.cast(code) * 3.7).cast(DTYPE_CODES[target]), expected)
    same((x.cast(code).columns(2, 7) * 3.7).cast(DTYPE_CODES[target]), expected[:, 2:7])
    same(x.cast("F64") / 3, values.double() / 3)
    assert x * 1.0 is x
    assert x / 1 is x
    assert x.cast(x.dtype) is x


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 4.5, 1 / 3, 8 ** (1 / 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_of_16_bit_floats_is_rounded_once_from_float32(tmp_path, dtype, factor):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[torch.isfinite(values)]
    folder = checkpoint_folder(tmp_path / "one", {"model.safetensors": {"x": values}})
    x = stored(open_checkpoint(folder).tensors["x"])
    assert torch.equal((x * factor).read(), (values.float() * factor).to(dtype))


def test_map_and_combine(blocks, files, tensors):
    w, v = stored(files["w"]), stored(files["v"])
    same(w.map(torch.sign), tensors["w"].sign())
    same(w.map(lambda values: values > 0, "BOOL"), tensors["w"] > 0)
    same(
        combine(lambda ab: torch.lerp(ab[0], ab[1], 0.25), [w, v], "F64"), torch.lerp(tensors["w"], tensors["v"], 0.25)
    )
    same(combine(lambda ab: ab[0] - ab[1], [w, v], "F32"), (tensors["w"] - tensors["v"]).float())
    assert combine(lambda ab: ab[0], [w, v], "F64").sources == (files["w"], files["v"])


def test_mean_is_exact_for_equal_tensors(blocks, files, tensors):
    w, v, b = stored(files["w"]), stored(files["v"]), stored(files["b"])
    same(mean([w, v]), (tensors["w"] + tensors["v"]) / 2)
    same(mean([b, b, b]).cast("BF16"), tensors["b"])
    assert mean([b]) is b


def test_draws_are_those_of_the_generator(blocks, files):
    count = (1 << 20) + 5
    drawn = lazy.normal((count,), 0.5, 3, "x", 1)
    same(drawn, seeds.normal((count,), 0.5, seeds.generator(3, "x", 1)))
    same((drawn * 2.0).cast("BF16"), (drawn.read() * 2).bfloat16())
    assert drawn.begins_with is None
    assert drawn.sources == ()


def test_computed_and_blockwise(blocks, files, tensors):
    w = stored(files["w"])
    transposed = computed((4, 6), "F32", lambda: w.read().T, [w])
    same(transposed, tensors["w"].T.float())
    assert transposed.sources == (files["w"],)
    same(lazy.blockwise((3,), "F32", lambda: ((i, torch.full((1,), float(i))) for i in range(3))), torch.arange(3.0))
    with pytest.raises(AssertionError):
        computed((2, 2), "F32", lambda: torch.zeros(3)).read()
    with pytest.raises(AssertionError, match="cannot be cut"):
        transposed.rows(0, 1)


def test_one_call_makes_several_tensors(files, tensors):
    calls = []

    def function():
        calls.append(len(calls))
        return {"up": tensors["w"].clone(), "down": tensors["w"].T.contiguous()}

    made = together({"up": ((6, 4), "F64"), "down": ((4, 6), "F64")}, function, [stored(files["w"])])
    results = {"up": torch.empty(2, 6, 4, dtype=torch.float64), "down": torch.empty(2, 4, 6, dtype=torch.float64)}

    def put(name, start, values):
        part = values if isinstance(values, torch.Tensor) else torch.frombuffer(bytearray(values), dtype=torch.float64)
        results[name].view(-1)[start : start + part.numel()] = part.view(-1)

    v = stored(files["v"])
    transposed = computed((4, 6), "F64", lambda: v.read().T)
    new = {"up": stack([v, made["up"] * 2.0]), "down": stack([transposed, made["down"]])}
    work = units((name, one.dtype, one.pieces) for name, one in new.items())
    assert [unit.computes for unit in work] == [True, True, False]
    for unit in work:
        unit.run(put)
    assert calls == [0]
    assert torch.equal(results["up"], torch.stack([tensors["v"], tensors["w"] * 2]))
    assert torch.equal(results["down"], torch.stack([tensors["v"].T, tensors["w"].T]))


def test_a_part_that_is_used_twice_is_changed_once(files, tensors):
    made = computed((6, 4), "F64", lambda: tensors["w"].clone())
    assert torch.equal(stack([made * 2.0, made, made * 3.0]).read(), torch.stack([tensors["w"] * f for f in (2, 1, 3)]))


def test_columns_of_one_matrix_are_read_once(files, tensors, monkeypatch):
    read = []
    original = streaming.read_region
    monkeypatch.setattr(streaming, "read_region", lambda region: read.append(region.width) or original(region))
    w = stored(files["w"])
    cut = stack([w.columns(i, i + 1) * 2.0 for i in (3, 0, 1, 2, 0)])
    assert torch.equal(cut.read(), torch.stack([tensors["w"][:, i : i + 1] * 2 for i in (3, 0, 1, 2, 0)]))
    assert sum(read) == files["w"].nbytes


def test_importing_imports_no_torch():
    code = "import sys, moesaic.checkpoint.lazy; print({'torch', 'numpy', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
