"""Statistics as files, their sums, and the scores of mixed domains."""

import json
from typing import Any

import numpy as np
import pytest

from moesaic.common.errors import MoesaicError
from moesaic.families.identity import SourceModel
from moesaic.selection.scorers import mix_domains, routing_mass, score, score_random
from moesaic.selection.statistics import (
    SUMS,
    ExpertStatistics,
    load_statistics,
    merge_by_domain,
    save_statistics,
)

SOURCE = SourceModel(
    name="m", revision=None, model_type="olmoe", num_experts=4, top_k=2, num_groups=1, layers=(0, 1), sample_hash="ab"
)


def statistics(seed, *, domain="math", source=SOURCE, tokens=100):
    draw = np.random.default_rng(seed)
    counts_LE = draw.integers(0, 2**60, (2, 4))
    sums: dict[str, Any] = {name: draw.random((2, 4)) for name in SUMS}
    return ExpertStatistics(source=source, domain=domain, tokens=tokens, counts_LE=counts_LE, **sums)


def test_read_back_to_the_last_bit(tmp_path):
    before = statistics(0)
    save_statistics(before, tmp_path / "s.json")
    after = load_statistics(tmp_path / "s.json")
    assert (after.source, after.domain, after.tokens) == (before.source, before.domain, before.tokens)
    for name in ("counts_LE", *SUMS):
        found = getattr(after, name)
        assert found.dtype == getattr(before, name).dtype
        assert (found == getattr(before, name)).all()


def test_statistics_of_one_domain_add_up():
    first, second, other = statistics(0), statistics(1), statistics(2, domain="code")
    merged = merge_by_domain([first, other, second])
    assert [one.domain for one in merged] == ["code", "math"]
    assert merged[1].tokens == 200
    for name in ("counts_LE", *SUMS):
        assert (getattr(merged[1], name) == getattr(first, name) + getattr(second, name)).all()
    with pytest.raises(MoesaicError, match="several domains are mixed"):
        merge_by_domain([first])[0].__add__(other)


def test_domains_have_the_same_say_however_many_tokens_they_have():
    few, many = statistics(0), statistics(1, domain="code", tokens=10**6)
    mixed = score([few, many], "easy_ep")
    for layer in range(2):
        for expert in range(4):
            expected = sum(
                part.drift_original_LE[layer, expert] / sum(part.drift_original_LE[layer].tolist())
                for part in (few, many)
            )
            assert mixed[layer, expert] == pytest.approx(expected, rel=1e-12)


def test_a_domain_without_any_score_adds_nothing():
    zero, some = np.zeros((1, 3)), np.array([[1.0, 3.0, 0.0]])
    assert mix_domains([zero, some]).tolist() == [[0.25, 0.75, 0.0]]


def test_experts_without_tokens_score_zero():
    empty = statistics(0)
    empty.counts_LE[:, 1] = 0
    empty.weighted_norm_LE[:, 1] = 0.0
    assert score([empty], "reap")[:, 1].tolist() == [0.0, 0.0]
    assert score([empty], "frequency")[:, 1].tolist() == [0.0, 0.0]


def test_random_scores_depend_on_seed_and_layer_alone():
    scores = score_random((0, 1, 5), 8, seed=3)
    assert (score_random((5,), 8, seed=3)[0] == scores[2]).all()
    assert (score_random((0, 1, 5), 8, seed=4) != scores).any()
    assert len({tuple(row) for row in scores.tolist()}) == 3


def test_routing_mass_is_the_share_of_the_kept_experts():
    one = statistics(0)
    mass = routing_mass([one], [(0, 2), (1,)])
    rows = one.probability_LE
    assert mass == pytest.approx([(rows[0, 0] + rows[0, 2]) / rows[0].sum(), rows[1, 1] / rows[1].sum()])
    assert routing_mass([one], [tuple(range(4))] * 2) == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a statistics file"),
        ({"tokens": 0}, "tokens: must be at least 1, got 0"),
        ({"counts_LE": [[1, 2, 3, 4]]}, "counts_LE: is not 2 layers of 4 experts"),
        ({"counts_LE": [[0.5, 2, 3, 4]] * 2}, r"counts_LE\.0\.0: expected a whole number, got 0\.5"),
        ({"probability_LE": [[-1, 0, 0, 0]] * 2}, "probability_LE: has a number below 0"),
        ({"probability_LE": "many"}, "probability_LE: expected a list, got 'many'"),
        ({"more": 1}, "more: unknown key"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    save_statistics(statistics(0), tmp_path / "s.json")
    document = json.loads((tmp_path / "s.json").read_text()) | change
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(MoesaicError, match=message):
        load_statistics(tmp_path / "s.json")
