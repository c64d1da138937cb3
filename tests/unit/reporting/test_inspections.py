"""An inspection in the page: everything that a view names is there, and the reader fits its place."""

import base64
import json
import zlib

import pytest

from moesaic.reporting.page import size
from moesaic.reporting.payload import inspected_models, model_payload, reader_payload, spread
from tests.tiny_inspection import tiny_inspection
from tests.unit.reporting.test_page import unpack


def unfold(folded):
    return json.loads(zlib.decompress(base64.b64decode(folded["json"])))


@pytest.fixture(scope="module")
def inspection():
    return tiny_inspection(layers=5)


def test_every_named_document_is_there(inspection):
    payload = model_payload(inspection, "tiny")
    documents = unfold(payload["documents"])
    named = {str(ranked.document) for cluster in inspection.clustering.clusters for ranked in cluster.documents}
    named |= {str(document) for document in inspection.reader.documents}
    assert documents.keys() >= named
    assert documents["3"]["opening"] == inspection.documents[3].opening


def test_loads_are_shares_to_five_digits(inspection):
    payload = model_payload(inspection, "tiny")
    load = unpack(payload["load"]) * payload["load"]["scale"]
    assert load == pytest.approx(inspection.statistics.load_SLE, abs=1e-5)
    assert payload["scopes"] == ("all", "code", "math", "prose")


def test_cards_keep_their_order(inspection):
    cards = unfold(model_payload(inspection, "tiny")["experts"])
    assert len(cards) == 5 * 8
    documents, strings, others = cards[8 + 3]  # second layer, expert 3
    assert documents == [[2, 0.4]]
    assert strings[0][1:] == [4, 0.5]
    assert others == [[4, 0.3, 1.5]]


def test_a_reader_with_room_has_all_layers(inspection):
    payload = reader_payload(inspection.reader, 10_000_000)
    assert list(payload["layers"]) == [0, 1, 2, 3, 4]
    for layer, routing in enumerate(payload["routing"]):
        assert (unpack(routing["ids"]) == inspection.reader.ids_RLK[:, layer]).all()
        weights = unpack(routing["weights"]) * routing["weights"]["scale"]
        assert weights == pytest.approx(inspection.reader.weights_RLK[:, layer].astype(float), abs=1 / 500)
    strings = unfold(payload["strings"])
    assert tuple(strings) == inspection.reader.strings


def test_a_reader_without_room_has_some_layers_and_fits(inspection):
    whole = size(reader_payload(inspection.reader, 10_000_000))
    for most in (whole - 100, whole // 2):
        payload = reader_payload(inspection.reader, most)
        assert len(payload["routing"]) == len(payload["layers"]) < 5
        assert len(payload["layers"]) == 1 or size(payload) <= most
        assert payload["layers"][-1] == 4
    assert list(reader_payload(inspection.reader, 0)["layers"]) == [4]


@pytest.mark.parametrize(
    ("count", "most", "layers"),
    [(3, 9, [0, 1, 2]), (3, 3, [0, 1, 2]), (5, 2, [0, 4]), (5, 1, [4]), (10, 4, [0, 3, 6, 9]), (48, 3, [0, 24, 47])],
)
def test_layers_are_spread_evenly(count, most, layers):
    assert list(spread(count, most)) == layers


def test_the_second_model_follows_the_first(inspection):
    import dataclasses

    other = tiny_inspection(name="./other")
    both = dataclasses.replace(inspection, against=other)
    assert [model.model.name for model in inspected_models(both)] == ["./tiny", "./other"]
    assert len(list(inspected_models(inspection))) == 1


def test_an_inspection_without_clusters_says_why(inspection):
    import dataclasses

    none = dataclasses.replace(inspection, clustering=None, why_no_clusters="3 tokens are fewer than 32 clusters")
    payload = model_payload(none, "tiny")
    assert payload["clusters"] is None
    assert payload["why_no_clusters"] == "3 tokens are fewer than 32 clusters"
