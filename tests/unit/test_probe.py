"""Where the tokens come from."""

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.probe import MAX_TOKENS, default_text, random_tokens, read_text, text_tokens


def by_character(text, verbose):
    return {"input_ids": [ord(c) % 50 for c in text]}


def test_default_text_is_long_prose_and_always_the_same():
    text = default_text()
    assert text == default_text()
    assert len(text.split()) > 2 * MAX_TOKENS


def test_a_long_text_gives_four_sequences_of_its_beginning():
    tokens = text_tokens(by_character, "ab" * 5000)  # pyright: ignore[reportArgumentType]
    assert tokens.shape == (4, 250)
    assert tokens[0, :2].tolist() == [ord("a") % 50, ord("b") % 50]


@pytest.mark.parametrize(("characters", "shape"), [(2, (1, 2)), (249, (1, 249)), (510, (2, 250))])
def test_a_short_text(characters, shape):
    assert text_tokens(by_character, "a" * characters).shape == shape  # pyright: ignore[reportArgumentType]


def test_random_tokens_are_seeded_and_in_the_vocabulary():
    tokens = random_tokens(7)
    assert tokens.shape == (4, 250)
    assert set(tokens.flatten().tolist()) == set(range(7))
    assert (tokens == random_tokens(7)).all()


def test_texts_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(MoesaicError, match=r"no\.txt: cannot be read"):
        read_text(tmp_path / "no.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MoesaicError, match="is not UTF-8 text"):
        read_text(tmp_path / "binary")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(MoesaicError, match="is empty"):
        read_text(tmp_path / "empty")
    with pytest.raises(MoesaicError, match="fewer than two tokens"):
        text_tokens(by_character, "a")  # pyright: ignore[reportArgumentType]
