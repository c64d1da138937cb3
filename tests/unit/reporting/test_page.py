"""Data in the page: numbers come back, and no text can become markup."""

import base64
import json
import math
import zlib

import numpy as np
import pytest

from moesaic.reporting.page import embed, fold, indices, pack, quantise

TYPES = {"u1": np.uint8, "u2": np.uint16, "i4": np.int32, "f4": np.float32}


def unpack(packed):
    """What the page does, in numpy."""
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, dtype=np.dtype(TYPES[packed["type"]]).newbyteorder("<")).reshape(packed["shape"])


@pytest.mark.parametrize(
    "text",
    [
        "</script><script>alert(1)</script>",
        "<!--<script>",
        "]]>",
        "&lt;",
        "\u2028\u2029",
        "\ud83d",
        "\x00\x1b",
        "👩‍👩‍👧 שלום",
    ],
)
def test_no_text_ends_the_block_and_every_text_comes_back(text):
    written = embed({"text": text, text: [text]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert written.isascii()
    assert json.loads(written) == {"text": text, text: [text]}


def test_numbers_that_json_cannot_write_become_null():
    assert json.loads(embed([math.nan, math.inf, -math.inf, 1.5])) == [None, None, None, 1.5]
    assert json.loads(embed({"a": np.array([[1.0, np.nan]]), "b": np.float32(0.5), "c": np.int64(3)})) == {
        "a": [[1.0, None]],
        "b": 0.5,
        "c": 3,
    }


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.float32])
def test_arrays_come_back_in_any_memory_order(kind):
    values = np.arange(24).reshape(2, 3, 4).astype(kind).transpose(2, 0, 1)
    packed = pack(values)
    np.testing.assert_array_equal(unpack(packed), values)
    assert packed["shape"] == [4, 2, 3]


@pytest.mark.parametrize("bits", [8, 16])
def test_quantised_numbers_are_half_a_step_off_at_most(bits):
    values = np.random.default_rng(0).random((50, 7)) * 0.03
    packed = quantise(values, bits=bits)
    step = values.max() / (2**bits - 1)
    assert np.abs(unpack(packed) * packed["scale"] - values).max() <= step / 2 * (1 + 1e-9)
    assert unpack(packed).max() == 2**bits - 1


def test_nothing_and_nan_quantise_to_zero():
    np.testing.assert_array_equal(unpack(quantise(np.zeros((2, 2)))), 0)
    np.testing.assert_array_equal(unpack(quantise(np.array([np.nan, 1.0]))), [0, 255])
    assert unpack(quantise(np.zeros((0, 3)))).shape == (0, 3)


def test_indices_take_one_byte_where_they_can():
    assert indices(np.array([0, 255]))["type"] == "u1"
    assert indices(np.array([0, 256]))["type"] == "u2"
    np.testing.assert_array_equal(unpack(indices(np.array([3, 65535]))), [3, 65535])


def test_folded_values_come_back():
    value = {"text": "</script>", "numbers": [1, 2.5, math.nan]}
    text = zlib.decompress(base64.b64decode(fold(value)["json"])).decode()
    assert json.loads(text) == {"text": "</script>", "numbers": [1, 2.5, None]}
