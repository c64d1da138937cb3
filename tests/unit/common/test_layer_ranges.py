import pytest

from moesaic.common.errors import MoesaicError
from moesaic.common.layer_ranges import parse_layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", (0, 1, 2, 3, 4, 5)),
        ("every:1", (0, 1, 2, 3, 4, 5)),
        ("every:2", (1, 3, 5)),
        ("every:4", (3,)),
        ("0", (0,)),
        ("1-3,5", (1, 2, 3, 5)),
        ("5, 1-2, 2", (1, 2, 5)),
    ],
)
def test_ranges(text, expected):
    assert parse_layers(text, 6) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "every:0", "every:", "every:7", "6", "2-9", "3-1", "-1", "1-", "a", "1;2", "every:-2", "1.5", "²"]
)
def test_refusals_name_the_flag(text):
    with pytest.raises(MoesaicError, match=r"^--layers "):
        parse_layers(text, 6)
