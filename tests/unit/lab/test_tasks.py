"""Parts of the tasks against loops."""

import numpy as np
import pytest
import torch

from moesaic.common.errors import MoesaicError
from moesaic.routing.pools import RoutingContext
from moesaic.routing.rules import RoutingDecision
from moesaic_lab.data import prepare, texts_of
from moesaic_lab.tasks import frequencies, violations


def _decision(ids_TK, allowed_TE):
    logits_TE = torch.zeros_like(allowed_TE, dtype=torch.float32)
    return RoutingDecision(
        logits_TE=logits_TE, expert_ids_TK=ids_TK, weights_TK=torch.ones(ids_TK.shape), allowed_TE=allowed_TE
    )


def test_violations_of_the_pool_are_counted():
    """Two documents of three tokens and one token of padding, which may use anything."""
    context = RoutingContext(
        document_ids_T=torch.tensor([0, 0, 0, 1, 1, 1, -1]), num_documents=2, document_keys_N=torch.arange(2)
    )
    pools = torch.tensor([[True, True, False, False], [False, False, True, True]])
    allowed_TE = torch.cat([pools[0].expand(3, 4), pools[1].expand(3, 4), torch.ones(1, 4, dtype=torch.bool)])
    inside = torch.tensor([[0, 1], [1, 0], [0, 1], [2, 3], [3, 2], [2, 3], [0, 3]])
    assert violations(_decision(inside, allowed_TE), context) == 0
    outside = inside.clone()
    outside[1, 0] = 2  # one selection outside, and a third expert for a document with a pool of two
    assert violations(_decision(outside, allowed_TE), context) == 2
    wide = allowed_TE.clone()
    wide[1, 2] = True  # a token's own pool is wider than its document's: as many experts as before, one too many
    assert violations(_decision(outside, wide), context) >= 1


def test_held_out_documents_are_cut_and_counted(tmp_path, monkeypatch):
    data = tmp_path / "given"
    data.mkdir()
    for split in ("train", "valid"):
        lines = [f'{{"text": "{letter * 300}"}}\n' for letter in "abcdefgh"]
        (data / f"x.{split}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    prepare(
        data=str(data),
        domains=("x",),
        documents=1,
        tasks=1,
        held_out_size=250,
        held_out_characters=100,
        vocabulary=300,
    )
    held_out = list(texts_of(tmp_path / "data" / "x.valid.jsonl"))
    assert held_out == ["a" * 100, "b" * 100, "c" * 100]
    assert (tmp_path / "data" / "x.train.jsonl").resolve() == data / "x.train.jsonl"
    assert (tmp_path / "data" / "tokenizer" / "tokenizer.json").exists()


def test_lines_that_are_no_documents_are_named(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a"}\n{"words": "b"}\n')
    with pytest.raises(MoesaicError, match=r"x\.jsonl:2: not a JSON object with a field `text`"):
        list(texts_of(file))


def test_bigrams_back_off_to_unigrams():
    counts_VV = np.array([[0, 3, 1], [2, 0, 0], [0, 0, 0]])
    unigram_V, bigram_VV = frequencies(counts_VV)
    assert unigram_V == pytest.approx([3 / 9, 4 / 9, 2 / 9])  # 2, 3 and 1 times, and one for each
    assert bigram_VV.sum(axis=1) == pytest.approx([1, 1, 1])
    assert bigram_VV[0, 1] == pytest.approx((3 - 0.75 + 0.75 * 2 * 4 / 9) / 4)
    assert bigram_VV[1, 2] == pytest.approx(0.75 * 1 * 2 / 9 / 2)
    assert bigram_VV[2] == pytest.approx(unigram_V), "never followed by anything"
