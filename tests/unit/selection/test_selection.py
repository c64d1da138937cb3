"""Selections as files: what is read is what was written, and contradictions are named."""

import json
from dataclasses import replace
from typing import Any

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.families.identity import SourceModel
from moesaic.routing.subset import Selection, check_counts, load_selection, save_selection
from moesaic.selection.select import best_experts, compare_selections, parse_keep, select, union_selections
from tests.tiny_moes import save_tiny_moe

SOURCE = SourceModel(
    name="m", revision=None, model_type="olmoe", num_experts=6, top_k=2, num_groups=1, layers=(0, 2), sample_hash="ab"
)


def selection(first, second, *, source=SOURCE, scores=None):
    row = (0.1, 0.25, 1 / 3, 0.0, 0.2, 0.15)
    return Selection(
        source=source,
        method="router",
        layers=source.layers,
        kept=(tuple(first), tuple(second)),
        scores=scores or (row, row),
        routing_mass_kept=(0.5, 0.25),
        details={"seed": 3},
    )


def test_written_and_read_again(tmp_path):
    save_selection(selection([0, 5], [1, 2]), tmp_path / "sub/s.json")
    assert load_selection(tmp_path / "sub/s.json") == selection([0, 5], [1, 2])
    document = json.loads((tmp_path / "sub/s.json").read_text())
    assert document["format"] == "moesaic-selection/1"
    assert document["layers"] == [0, 2]
    assert document["kept"] == [[0, 5], [1, 2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "moesaic-selection/2"}, "not a selection"),
        ({"kept": [[0, 1]]}, "kept has 1 rows for 2 MoE layers"),
        ({"kept": [[0, 1], []]}, "kept in layer 2: no expert"),
        ({"kept": [[0, 1], [2, 1]]}, r"kept in layer 2: expert ids must rise, got \[2, 1\]"),
        ({"kept": [[0, 6], [1, 2]]}, "kept in layer 0: expert ids must be from 0 to 5"),
        ({"kept": [[0, 1.5], [1, 2]]}, r"kept\.0\.1: expected a whole number, got 1\.5"),
        ({"kept": 3}, "kept: expected a list, got 3"),
        ({"scores": [[1, 2], [3, 4]]}, "layer 0 has 2 scores for 6 experts"),
        ({"scores": [[1, 2, 3, 4, 5, 1e999]] * 2}, r"scores\.0\.5: expected a finite number, got inf"),
        ({"layers": [0, 1]}, "are not the MoE layers of its source"),
        ({"routing_mass_kept": [2, 0]}, "share outside 0 to 1"),
        ({"extra": 1}, "extra: unknown key"),
        ({"source": {"name": "m"}}, "source.revision: this key is required and missing"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path, change, message):
    document = selection([0, 5], [1, 2]).to_dict() | change
    file = tmp_path / "s.json"
    file.write_text(json.dumps(document))
    with pytest.raises(MoesaicError, match=message) as caught:
        load_selection(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(tmp_path):
    document = selection([0, 5], [1, 2]).to_dict()
    del document["scores"]
    (tmp_path / "s.json").write_text(json.dumps(document))
    with pytest.raises(MoesaicError, match="scores: this key is required and missing"):
        load_selection(tmp_path / "s.json")


def test_overlap_is_common_over_union():
    rows = compare_selections(selection([0, 1, 2], [3]), selection([1, 2, 4, 5], [3]))
    assert rows == [
        {"layer": 0, "kept": [3, 4], "common": 2, "overlap": 2 / 5},
        {"layer": 2, "kept": [1, 1], "common": 1, "overlap": 1.0},
    ]


def test_a_union_is_filled_up_to_one_number_with_the_best_scores():
    union = union_selections(selection([0, 3], [0, 1]), selection([3, 4], [0, 1]))
    assert union.kept == ((0, 3, 4), (0, 1, 2))  # expert 2 has the best score of those left
    assert union.details["filled_up"] == [0, 1]


def test_a_union_of_grouped_selections_keeps_equal_groups():
    source = replace(SOURCE, num_groups=2)
    union = union_selections(selection([0, 3], [1, 5], source=source), selection([1, 3], [1, 4], source=source))
    assert [[sum(e // 3 == g for e in ids) for g in (0, 1)] for ids in union.kept] == [[2, 2], [2, 2]]
    assert {0, 1, 3} < set(union.kept[0])
    assert {1, 4, 5} < set(union.kept[1])


def test_selections_of_different_models_have_no_union():
    other = replace(SOURCE, sample_hash="cd")
    with pytest.raises(MoesaicError, match="with other weights"):
        union_selections(selection([0], [1]), selection([0], [1], source=other))


@pytest.mark.parametrize(
    ("text", "experts", "groups", "keep"),
    [("32", 128, 1, 32), (3, 8, 1, 3), ("25%", 128, 1, 32), ("12.5%", 8, 1, 1), ("30%", 8, 1, 3), ("30%", 16, 4, 8)],
)
def test_keep_as_number_or_share(text, experts, groups, keep):
    assert parse_keep(text, experts, groups) == keep


def test_the_best_experts_lower_ids_first_among_equals():
    import numpy as np

    assert best_experts(np.array([0.1, 0.5, 0.5, 0.5, 0.2]), 2) == (1, 2)
    assert best_experts(np.array([9.0, 8, 7, 6, 1, 2, 3, 4]), 4, num_groups=2) == (0, 1, 6, 7)


def test_our_groups_must_leave_one_expert_for_each_active_one():
    config = {"routing_rule": "one_per_group", "expert_groups": [0, 0, 0, 1, 1, 1]}
    assert check_counts(SOURCE, config, [[0, 3], [1, 5]], top_k=None, where="s") == 2
    with pytest.raises(MoesaicError, match="s: keeps experts of 1 groups in MoE layer 1, but one_per_group needs 2"):
        check_counts(SOURCE, config, [[0, 3], [1, 2]], top_k=None, where="s")
    assert check_counts(SOURCE, config, [[0, 3], [1, 2]], top_k=1, where="s") == 1


@pytest.mark.parametrize(
    ("family", "shared"), [("qwen2_moe", 1), ("deepseek_v2", 2), ("granitemoeshared", 1), ("olmoe", 0)]
)
def test_keep_counts_routed_experts_and_keep_total_all(tmp_path, family, shared):
    """Row 13 of docs/peers.md."""
    config: dict[str, Any] = {"n_shared_experts": 2} if family == "deepseek_v2" else {}
    source = save_tiny_moe(tmp_path / "moe", family, **config)
    for kept, asked in ((4, {"keep": 4}), (4, {"keep_total": 4 + shared}), (4, {"keep": "50%"})):
        assert select(source, method="random", **asked).counts[0] == kept
    with pytest.raises(MoesaicError, match="--keep-total 99: must be from 1 to"):
        select(source, method="random", keep_total=99)
    with pytest.raises(MoesaicError, match="--keep, --keep-total: give one of the two"):
        select(source, method="random", keep_total=4, keep=4)


def test_a_quarter_of_127_routed_and_1_shared():
    assert parse_keep("25%", 127) == 32
    assert parse_keep("25%", 127 + 1) - 1 == 31
