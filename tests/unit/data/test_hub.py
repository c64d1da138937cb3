import sys
from types import SimpleNamespace

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data.files import HubData, resolve_hub
from moesaic.data.recipe import SourceRecipe
from moesaic.data.tokenise import Encoder, tokenise

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"hf://org/name@{COMMIT}", (None, "train")),
        (f"hf://org/name@{COMMIT}:test", (None, "test")),
        (f"hf://org/name@{COMMIT}:english:test", ("english", "test")),
    ],
)
def test_references_with_a_commit_need_no_request(path, expected):
    assert resolve_hub(path) == HubData(name="org/name", commit=COMMIT, config=expected[0], split=expected[1])


@pytest.mark.parametrize("path", ["hf://name", "hf://org/name:a:b:c", "hf://org/name@", "hf://org/name:"])
def test_other_references_are_refused(path):
    with pytest.raises(MoesaicError, match=r"expected hf://org/name\[@revision\]"):
        resolve_hub(path)


def test_a_branch_is_resolved_to_its_commit(monkeypatch):
    import huggingface_hub

    asked = []

    def dataset_info(_self, name, *, revision):
        asked.append((name, revision))
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    assert resolve_hub("hf://org/name@v2:en:test") == HubData(name="org/name", commit=COMMIT, config="en", split="test")
    assert resolve_hub("hf://org/name").commit == COMMIT
    assert asked == [("org/name", "v2"), ("org/name", None)]


def test_offline_says_what_to_do(monkeypatch):
    import huggingface_hub

    def dataset_info(_self, _name, *, revision):
        raise OSError("offline mode is enabled\nmore")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    with pytest.raises(MoesaicError) as caught:
        resolve_hub("hf://org/name")
    message = str(caught.value)
    assert (
        message == "hf://org/name: cannot find the revision on the hub (offline mode is enabled); offline, give @COMMIT"
    )


@pytest.fixture
def served(monkeypatch):
    """`datasets` streaming three rows, then failing where `broken` is set."""
    import datasets

    state = SimpleNamespace(calls=[], broken=False)

    def rows():
        yield from ({"text": "Two", "id": 1}, {"text": "", "id": 2}, {"text": "four", "id": 3})
        if state.broken:
            raise ConnectionError("connection reset")

    def load_dataset(name, config, *, split, revision, streaming):
        state.calls.append((name, config, split, revision, streaming))
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return state


def test_a_hub_data_set_is_streamed_into_the_cache_once(served, tokenizer, tmp_path):
    source = SourceRecipe(path=f"hf://org/name@{COMMIT}:en:test", domain="d")
    cache = tokenise(source, Encoder(tokenizer), tmp_path)
    assert tokenizer.decode(cache.tokens) == "Two<eos>four<eos>"
    assert tokenise(source, Encoder(tokenizer), tmp_path).folder == cache.folder
    assert served.calls == [("org/name", "en", "test", COMMIT, True)]
    other = SourceRecipe(path=f"hf://org/name@{COMMIT[::-1]}:en:test", domain="d")
    assert tokenise(other, Encoder(tokenizer), tmp_path).folder != cache.folder


def test_a_connection_that_breaks_leaves_nothing(served, tokenizer, tmp_path):
    served.broken = True
    with pytest.raises(MoesaicError, match=r"hf://org/name:train: reading stopped after row 3 \(connection reset\)"):
        tokenise(SourceRecipe(path=f"hf://org/name@{COMMIT}", domain="d"), Encoder(tokenizer), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_field_names_the_row(served, tokenizer, tmp_path):
    source = SourceRecipe(path=f"hf://org/name@{COMMIT}", domain="d", text="body")
    with pytest.raises(MoesaicError, match=r"hf://org/name:train: row 1: no field 'body'; the record has id, text"):
        tokenise(source, Encoder(tokenizer), tmp_path)


def test_a_data_set_that_cannot_be_opened(monkeypatch, tokenizer, tmp_path):
    import datasets

    def load_dataset(*_arguments, **_options):
        raise ValueError("BuilderConfig 'xx' not found\nAvailable: ...")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(MoesaicError, match=r"cannot be opened \(BuilderConfig 'xx' not found\)$"):
        tokenise(SourceRecipe(path=f"hf://org/name@{COMMIT}", domain="d"), Encoder(tokenizer), tmp_path)


def test_missing_datasets_is_one_line(monkeypatch, tokenizer, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MoesaicError, match=r"hub data sets need datasets; pip install 'moesaic\[train\]'"):
        tokenise(SourceRecipe(path=f"hf://org/name@{COMMIT}", domain="d"), Encoder(tokenizer), tmp_path)
