"""`moesaic inspect` as a command: every family, repeatable, bad input in one line, nothing half written."""

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import moesaic
from moesaic.analysis.documents import token_strings
from moesaic.analysis.format import read_inspection
from moesaic.cli.app import run
from moesaic.common.errors import MoesaicError
from tests.tiny_inspection import NASTY, tiny_inspection
from tests.tiny_models import save_tiny
from tests.tiny_moes import MOE_FAMILIES
from tests.tiny_texts import save_model, write_domains
from tests.tiny_training import save_tokenizer, write_documents

SMALL: dict[str, Any] = {"min_length": 8, "clusters": 4, "batch_size": 4}


def settings(**changes: Any) -> dict[str, Any]:
    return SMALL | changes


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_domains(tmp_path_factory.mktemp("data") / "texts.jsonl", number=10)


def error_of(capsys, *arguments: object) -> str:
    """The one line of a command that is refused."""
    assert run(["inspect", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("moesaic: error: ")
    assert not [line for line in lines if "Traceback" in line]
    return lines[-1]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_counts_are_those_of_the_models_own_routers(family: str, tmp_path: Path, data: Path):
    """What is stored is what each router decided: run the documents one by one, and count."""
    folder = save_model(tmp_path / "model", family)
    found = moesaic.inspect(folder, tmp_path / "out", data=data, tokens=400, **SMALL)
    ids = np.load(tmp_path / "out/capture/tokens.npy")
    starts = np.load(tmp_path / "out/capture/starts.npy")
    logits = np.load(tmp_path / "out/capture/logits.npy", mmap_mode="r")
    loaded = moesaic.load(folder)
    counts = np.zeros_like(found.statistics.counts_SLE[0])
    from moesaic.routing.capture import find_blocks

    seen: list[Any] = []
    for block in find_blocks(loaded):
        block.router.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    with torch.inference_mode():
        for first, last in pairwise(starts):
            seen.clear()
            loaded(input_ids=torch.from_numpy(ids[first:last].astype(np.int64))[None], use_cache=False)
            for layer, output in enumerate(seen):
                counts[layer] += np.bincount(output[2].flatten().numpy(), minlength=8)
                assert logits[first:last, layer] == pytest.approx(output[0].float().numpy(), abs=2e-2)
    assert found.statistics.counts_SLE[0].sum() == counts.sum()
    assert np.abs(found.statistics.counts_SLE[0] - counts).sum() <= 2  # rounding of a batch may flip a near tie
    assert found.model.num_experts == 8
    assert found.model.scoring == ("sigmoid" if family in ("deepseek_v3", "glm4_moe") else "softmax")
    assert (found.model.groups is not None) == (family in ("deepseek_v3", "glm4_moe"))


@pytest.mark.parametrize("similarity", [None, 3, 20])
def test_similarity_is_of_whole_documents_or_of_the_tokens_asked_for(
    tmp_path: Path, model: Path, data: Path, similarity: int | None
):
    """Against every document alone through the model, its probabilities in float64; all else is of 6 tokens."""
    found = moesaic.inspect(
        model, tmp_path / "out", data=data, document_tokens=6, similarity_tokens=similarity, **SMALL
    )
    loaded, tokenizer = moesaic.load(model), AutoTokenizer.from_pretrained(model)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    means: dict[str, list[np.ndarray]] = {}
    from moesaic.routing.capture import find_blocks

    seen: list[Any] = []
    for block in find_blocks(loaded):
        block.router.register_forward_hook(lambda _module, _inputs, output: seen.append(output[0].double()))
    longest = 0
    for record in records:
        ids = tokenizer(record["text"])["input_ids"]
        longest = max(longest, len(ids))
        seen.clear()
        with torch.inference_mode():
            loaded(input_ids=torch.tensor([ids]), use_cache=False)
        means.setdefault(record["domain"], []).append(
            np.stack([logits[:similarity].softmax(-1).mean(0).numpy() for logits in seen])
        )
    assert longest > 20
    domains = [np.mean(means[domain.name], axis=0) for domain in found.data.domains]
    assert found.data.documents == len(records)
    assert found.data.tokens == 6 * len(records)
    assert found.statistics.probability_NLE == pytest.approx(np.stack(domains), rel=2e-3)  # logits of half precision
    for one, other in ((0, 1), (1, 0)):
        a, b = domains[one].ravel(), domains[other].ravel()
        cosine = a @ b / np.sqrt((a @ a) * (b @ b))
        assert found.statistics.similarity_NN[one, other] == pytest.approx(cosine, rel=1e-4)


def test_the_same_seed_gives_the_same_files_and_another_does_not(tmp_path: Path, model: Path, data: Path):
    for name, seed in (("first", 0), ("second", 0), ("third", 1)):
        moesaic.inspect(model, tmp_path / name, data=data, tokens=300, seed=seed, **SMALL)
    for file in sorted(path for path in (tmp_path / "first").rglob("*") if path.is_file()):
        other = tmp_path / "second" / file.relative_to(tmp_path / "first")
        assert file.read_bytes() == other.read_bytes(), file.name
    documents = [{one.source for one in read_inspection(tmp_path / name).documents} for name in ("first", "third")]
    assert documents[0] != documents[1]


def test_samples_are_nested_and_batches_do_not_matter(tmp_path: Path, model: Path, data: Path):
    small = moesaic.inspect(model, tmp_path / "small", data=data, tokens=200, **SMALL)
    large = moesaic.inspect(model, tmp_path / "large", data=data, tokens=400, **settings(batch_size=3))
    assert {one.source for one in small.documents} < {one.source for one in large.documents}
    assert small.data.tokens <= 200 < large.data.tokens <= 400
    again = moesaic.inspect(model, tmp_path / "again", data=data, tokens=200, **settings(batch_size=1))
    assert np.abs(again.statistics.counts_SLE - small.statistics.counts_SLE).sum() <= 4
    assert again.statistics.mass_SLE == pytest.approx(small.statistics.mass_SLE, abs=1e-4)


def test_the_command_prints_tables_writes_what_report_reads_and_json(tmp_path: Path, model: Path, data: Path, capsys):
    out = tmp_path / "out"
    arguments = ["inspect", str(model), str(out), "--data", str(data), "--min-length", "8", "--clusters", "4"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    for expected in ("Verdict: ", "Load of the experts", "4 token clusters", "First token", "math", "moesaic report"):
        assert expected in text
    assert run([*arguments, "--overwrite", "--against", str(model)]) == 0
    assert "Side by side" in capsys.readouterr().out
    found = read_inspection(out)
    assert found.against is not None
    assert found.scopes == ("all", "code", "math")
    assert found.data.domain_field == "domain"
    assert run([*arguments, "--overwrite", "--against", str(model), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["level"] == found.verdict.level
    assert [row["layer"] for row in document["layers"]] == [0, 1]
    assert run(["inspect", str(model), str(tmp_path / "dry"), *arguments[3:], "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["tokens"] == found.data.tokens
    assert not (tmp_path / "dry").exists()


def test_reader_gives_the_documents_back(tmp_path: Path, model: Path, data: Path):
    found = moesaic.inspect(model, tmp_path / "out", data=data, **SMALL)
    reader = found.reader
    texts = {json.loads(line)["text"] for line in data.read_text().splitlines()}
    assert reader.sampled == len(found.documents)  # fewer than 25,000 tokens: all of them
    for row, document in enumerate(reader.documents):
        start, stop = reader.first_token_D1[row : row + 2]
        assert "".join(reader.strings[index] for index in reader.string_R[start:stop]) in texts
        assert stop - start == found.documents[document].tokens
    assert (np.diff(reader.weights_RLK.astype(float), axis=-1) <= 0).all()


@pytest.mark.parametrize(
    "text", ["a \u202ebc\u202c d\x00\x1b[31m e", "<script>alert(1)</script> a b", "שלום a b c d", "e\u0301 😀 " * 4]
)
def test_texts_of_every_kind(tmp_path: Path, model: Path, text: str, capsys):
    file = tmp_path / "odd.jsonl"
    file.write_text("\n".join(json.dumps({"text": text * count, "domain": text}) for count in (2, 3)))
    found = moesaic.inspect(model, tmp_path / "out", data=file, **settings(clusters=2))
    assert found.documents[0].opening.startswith(text[:8])
    assert run(["inspect", str(model), str(tmp_path / "two"), "--data", str(file), "--min-length", "8"]) == 0
    shown = capsys.readouterr().out
    assert not set(shown) & {"\x00", "\x1b", "\u202e", "\u202c"}


def test_one_document_of_one_domain_with_fewer_tokens_than_clusters(tmp_path: Path, model: Path):
    file = tmp_path / "one.txt"
    file.write_text("just some words")
    found = moesaic.inspect(model, tmp_path / "out", data=file, min_length=8)
    assert found.clustering is None
    assert found.why_no_clusters == "there are 15 tokens for 32 clusters; give more data"
    assert found.statistics.similarity_NN.tolist() == [[pytest.approx(1.0)]]
    assert found.data.domains[0].name == "one"
    assert set(found.statistics.token_cluster_T) == {-1}
    found = moesaic.inspect(model, tmp_path / "clusters", data=file, min_length=8, clusters=3)
    assert found.clustering is not None
    assert found.clustering.nmi is None


def test_our_own_model_with_groups_and_an_upcycled_one_without(tmp_path: Path, data: Path):
    base = save_tokenizer(save_tiny(tmp_path / "base", "llama"))
    for routing, inside in (("one_per_group", 0.0), ("topk", None)):
        moe = tmp_path / routing
        moesaic.upcycle(base, moe, method="virtual_group", experts=8, shards=2, top_k=2, routing=routing, scale="none")
        found = moesaic.inspect(moe, tmp_path / f"{routing}.out", data=data, tokens=200, **SMALL)
        assert found.model.groups == ((0, 0, 1, 1, 2, 2, 3, 3),) * 2
        if inside is not None:
            assert (found.statistics.coselection_SL == inside).all()
        else:  # tied rows: the two shards of a group are always chosen together
            assert (found.statistics.coselection_SL == 1.0).all()


def test_what_is_refused_is_one_line_and_leaves_nothing(tmp_path: Path, model: Path, data: Path, capsys):
    out = tmp_path / "out"
    given = (model, out, "--data", data, "--min-length", "8")
    dense = save_tokenizer(save_tiny(tmp_path / "dense", "llama"))
    assert "has no routers to look into: model_type 'llama'" in error_of(capsys, dense, out, "--data", data)
    assert "--data: is needed" in error_of(capsys, model, out)
    assert "no field 'topic'; the record has domain, text; set --domain-field" in error_of(
        capsys, *given, "--domain-field", "topic"
    )
    assert "none of 20 documents has 5000 to 6000 tokens (20 are shorter, 0 longer)" in error_of(
        capsys, model, out, "--data", data, "--min-length", 5000, "--max-length", 6000
    )
    assert "--tokens 1X: not a number of tokens" in error_of(capsys, *given, "--tokens", "1X")
    assert "--tokens: 5 are fewer than the first document has" in error_of(capsys, *given, "--tokens", "5")
    assert "--max-length 4: must be at least --min-length" in error_of(capsys, *given, "--max-length", "4")
    assert "--clusters 1: must be from 2 to 1000" in error_of(capsys, *given, "--clusters", "1")
    assert "no such file or folder" in error_of(capsys, model, out, "--data", tmp_path / "none.jsonl")
    assert "--against" in error_of(capsys, *given, "--against", other_tokenizer(tmp_path))
    assert not out.exists()
    out.mkdir()
    assert "exists; choose another target, or pass --overwrite" in error_of(capsys, *given)


def other_tokenizer(tmp_path: Path) -> Path:
    folder = save_model(tmp_path / "other")
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text())
    vocabulary = settings["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "\\ud800 broken text"}', r"bad.jsonl:1: the text is not valid Unicode \(a lone surrogate"),
        (b'{"text": "\xff\xfe"}', "bad.jsonl:1: not UTF-8"),
        (b'{"text": "words enough", "domain": ["a"]}', r"bad.jsonl:1: field 'domain' must name a domain"),
        (b'{"text": "words enough", "domain": "a"}\n{"text": "more words"}', "bad.jsonl:2: no field 'domain'"),
        (b'{"other": 1}', "bad.jsonl:1: no text is known for a record with other"),
        (b"", "the file is empty"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, model: Path, content: bytes, message: str):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    with pytest.raises(MoesaicError, match=message):
        moesaic.inspect(model, tmp_path / "out", data=file, **SMALL)
    assert not (tmp_path / "out").exists()


def test_a_damaged_router_is_named(tmp_path: Path, data: Path):
    folder = save_model(tmp_path / "model", "qwen3_moe")
    broken: Any = moesaic.load(folder)
    with torch.no_grad():
        broken.model.layers[1].mlp.gate.weight[0, 0] = float("nan")
    broken.save_pretrained(folder)
    with pytest.raises(MoesaicError, match=r"model: layer 1, mlp\.gate gives NaN, and its own weight is not finite"):
        moesaic.inspect(folder, tmp_path / "out", data=data, **SMALL)
    assert not (tmp_path / "out").exists()


def test_too_many_domains(tmp_path: Path, model: Path):
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"text": "word " * 3, "id": index}) for index in range(300)))
    with pytest.raises(MoesaicError, match="--domain-field id: has 300 different values, at most 256"):
        moesaic.inspect(model, tmp_path / "out", data=file, domain_field="id", **SMALL)


def test_domains_are_the_names_of_files_without_a_field(tmp_path: Path, model: Path, capsys):
    files = [write_documents(tmp_path / f"{name}.jsonl", name, number=5, seed=0) for name in ("one", "two")]
    arguments = ["inspect", str(model), str(tmp_path / "out"), "--min-length", "8", "--clusters", "2"]
    assert run([*arguments, "--data", str(files[0]), str(files[1])]) == 0
    assert "has no field 'domain'; the domain is 'one'" in capsys.readouterr().err
    found = read_inspection(tmp_path / "out")
    assert [domain.name for domain in found.data.domains] == ["one", "two"]
    assert found.data.domain_field is None


@pytest.mark.parametrize("against", [False, True])
def test_the_summary_is_one_screen_of_a_large_model(against):
    from moesaic.analysis.summary import Screen, render

    domains = ("code", "mathematics", "prose", "wikipedia", "encyclopedia of long names")
    made = tiny_inspection(name="./models/emo", layers=48, experts=64, domains=domains, documents=50, clusters=32)
    lines = render(replace(made, against=tiny_inspection()) if against else made, Screen(width=80)).splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    assert against or [line.split()[0] for line in lines if "collapsed " in line] == ["48"]  # the worst layer first


def test_a_notebook_gets_the_summary_and_shows_nothing_itself(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert tiny_inspection().lines()[0].startswith(tiny_inspection().model.name)


def test_no_clusters_need_no_scikit_learn(tmp_path: Path, model: Path, data: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MoesaicError, match="token clusters need scikit-learn"):
        moesaic.inspect(model, tmp_path / "out", data=data, **SMALL)
    found = moesaic.inspect(model, tmp_path / "out", data=data, **settings(clusters=0))
    assert found.clustering is None
    assert found.why_no_clusters == "none were asked for"
    assert "scikit-learn" not in found.versions
    assert read_inspection(tmp_path / "out").clustering is None


def test_held_out_text_is_that_of_eval(tmp_path: Path, model: Path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for domain in ("math", "code"):
        write_documents(folder / f"{domain}.jsonl", domain, number=5, seed=0)
        write_documents(folder / f"{domain}.valid.jsonl", domain, number=3, seed=1)
    given = settings(clusters=0, domain_field="")
    found = moesaic.inspect(model, tmp_path / "out", data="perplexity", data_dir=str(folder), **given)
    assert [(one.name, one.documents) for one in found.data.domains] == [("code", 3), ("math", 3)]
    assert found.data.records == 6
    task = tmp_path / "mine.yaml"
    task.write_text("kind: perplexity\ndata: corpus/math.valid.jsonl\ndomain: ''\n")
    found = moesaic.inspect(model, tmp_path / "own", data=task, **settings(clusters=0))
    assert [(one.name, one.documents) for one in found.data.domains] == [("math", 3)]
    with pytest.raises(MoesaicError, match=r"--data perplexity: held-out text is local; give --data-dir"):
        moesaic.inspect(model, tmp_path / "none", data="perplexity", **given)


def test_a_terminal_without_unicode_and_text_that_attacks_it():
    from moesaic.analysis.summary import Screen, render, visible

    text = render(tiny_inspection(), Screen(width=90, unicode=False))
    assert text.isascii()
    assert not set(render(tiny_inspection(), Screen(width=90))) & {"\x1b", "\x00", "\u202e"}
    assert visible(NASTY) == "</script><b>&\\u202eabc\\x00\\x1b[31m\ufffd"
    assert visible("a\nb\u2028") == "a⏎b\\u2028"
    assert len(visible("x" * 100, 10)) == 10


def test_pieces_of_characters_belong_to_the_first_token(tmp_path: Path):
    """A byte-level tokenizer: an emoji is several tokens, and the pieces still join to the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from moesaic.analysis.documents import Entry, draw_sample, string_of
    from moesaic.analysis.recipe import InspectRecipe

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")
    text = "né 😀 x"
    sample = draw_sample(
        [Entry(text=text, domain="d", where="w")],
        tokenizer,
        InspectRecipe(checkpoint="m", data=("d",), min_length=1),
        vocab_size=256,
        name="n",
    )
    string = string_of(tokenizer)
    pieces = token_strings(sample.documents[0], string)
    assert len(pieces) == len(text.encode())
    assert "".join(pieces) == text
    assert pieces[1:3] == ["é", ""]
    emoji = sample.documents[0].ids[pieces.index("😀")]
    assert string(int(emoji)) == "ð"  # the tokenizer's spelling of one byte
