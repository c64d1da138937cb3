"""Results files in the page."""

import json

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.reporting.payload import results_payload
from tests.tiny_report import results_document, write_results


def test_scores_and_what_they_are_over(tmp_path):
    payload = results_payload(write_results(tmp_path / "results.json"))
    assert payload["tasks"]["arc_easy"]["score"] == 0.5
    assert payload["tasks"]["arc_easy"]["kept"] == 1.0
    assert payload["tasks"]["perplexity"]["text"]["domains"]["math"]["perplexity"] == 20.1
    assert payload["missing"] == {"boolq": "boolq.jsonl is not there"}
    assert payload["averages"][0]["over"] == ["arc_easy", "piqa"]
    assert "identity" not in payload["tasks"]["arc_easy"]


def test_a_subset_belongs_to_the_model_that_it_was_taken_from(tmp_path):
    full = results_payload(write_results(tmp_path / "full.json"))
    subset = results_payload(write_results(tmp_path / "subset.json", kept=2, weights="x" * 32))
    assert full["model"] == subset["model"] == "s" * 32
    assert subset["tasks"]["piqa"]["kept"] == 0.25


@pytest.mark.parametrize(
    ("experts", "selection", "share"),
    [
        (None, None, None),
        ({"kept": 8, "of": 8}, {"kept": 2, "of": 8}, 0.25),
        ({"kept": 8, "of": 8}, {"kept": [2, 4], "of": 8}, 0.375),
        ({"kept": 4, "of": 8}, {"kept": 2, "of": 4}, 0.25),
    ],
)
def test_share_of_the_experts_that_were_used(tmp_path, experts, selection, share):
    document = results_document()
    document["checkpoint"]["experts"] = experts
    document["tasks"]["piqa"]["selection"] = selection
    (tmp_path / "results.json").write_text(json.dumps(document))
    assert results_payload(tmp_path / "results.json")["tasks"]["piqa"]["kept"] == share


def test_damaged_files_are_refused(tmp_path):
    file = tmp_path / "results.json"
    for change, says in (
        ({"format": "x"}, "not a results file"),
        ({"checkpoint": {}}, "checkpoint.name: this key is required and missing; evaluate again"),
        ({"tasks": {"a": 3}}, "tasks.a: expected keys and values"),
    ):
        file.write_text(json.dumps(results_document() | change))
        with pytest.raises(MoesaicError, match=says):
            results_payload(file)
