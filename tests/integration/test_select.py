"""`select` from files to a selection: data, statistics, command line, refusals; streaming against the whole model."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.checkpoint.source import open_checkpoint
from moesaic.cli import app as cli
from moesaic.common.errors import MoesaicError
from moesaic.data.calibration import in_split, record_digest
from moesaic.families.identity import describe
from moesaic.families.moe import detect_moe
from moesaic.loading import load
from moesaic.routing.subset import load_selection
from moesaic.selection import stream as streaming
from moesaic.selection.collect import collect_statistics
from moesaic.selection.extract import extract
from moesaic.selection.select import select
from moesaic.selection.statistics import SUMS, load_statistics
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import VOCABULARY, save_tokenizer, tiny_recipe, write_documents
from tests.unit.selection.kinds import KINDS, save_kind

DOCUMENTS = [[5, 9, 33, 7, 80, 41], [17, 4, 28], [50, 51, 52, 53, 60, 70, 3, 8], [90, 91], [11, 12, 13, 14]]


@pytest.fixture
def moe(tmp_path):
    folder = save_tiny_moe(tmp_path / "moe", "qwen3_moe")
    save_tokenizer(folder)
    write_documents(tmp_path / "math.jsonl", "math", number=20, seed=0)
    write_documents(tmp_path / "code.jsonl", "code", number=20, seed=0)
    return folder


def measure(folder, documents=DOCUMENTS, *, batch_size=8, **options):
    checkpoint = open_checkpoint(folder)
    model = detect_moe(checkpoint)
    source = describe(checkpoint, model)
    return collect_statistics(checkpoint, model, source, {"d": documents}, batch_size=batch_size, **options)[0]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_streamed_pass_is_the_model_s_own(tmp_path, kind):
    """Every layer gets the hidden states that the loaded model gives it, padding or not."""
    folder = save_kind(tmp_path / "m", kind)
    batches = list(streaming.make_batches(DOCUMENTS, size=2, padding_id=0))
    inputs = []

    def step(layer):
        for batch in batches:
            assert batch.hidden_BSD is not None
            inputs.append(batch.hidden_BSD.reshape(-1, 32)[batch.mask_T].clone())
            batch.hidden_BSD = layer.run(batch)

    streamed = streaming.StreamedModel(open_checkpoint(folder))
    streamed.layers(batches, step)
    assert all(parameter.is_meta for parameter in streamed._base.layers.parameters())
    model = load(folder)
    expected = [[] for _ in model.model.layers]
    for layer, found in zip(model.model.layers, expected, strict=True):
        layer.register_forward_pre_hook(lambda _m, args, found=found: found.append(args[0][0]))
    for document in DOCUMENTS:
        model(torch.tensor([document]), use_cache=False)
    per_layer = len(batches)
    for layer, found in enumerate(expected):
        streamed_rows = torch.cat(inputs[layer * per_layer : (layer + 1) * per_layer])
        torch.testing.assert_close(streamed_rows, torch.cat(found), rtol=1e-5, atol=1e-5)


def test_one_layer_s_weights_are_in_memory_at_a_time(tmp_path):
    folder = save_kind(tmp_path / "m", "olmoe")
    batches = list(streaming.make_batches(DOCUMENTS, size=8, padding_id=0))
    streamed = streaming.StreamedModel(open_checkpoint(folder))
    real = []

    def step(layer):
        real.append({name.split(".")[0] for name, p in streamed._base.named_parameters() if not p.is_meta})
        real[-1] |= {f"layer {i}" for i, m in enumerate(streamed._base.layers) if not next(m.parameters()).is_meta}
        for batch in batches:
            batch.hidden_BSD = layer.run(batch)

    streamed.layers(batches, step)
    assert real == [{"layers", "layer 0"}, {"layers", "layer 1"}]


@pytest.mark.parametrize("kind", ["olmoe", "deepseek_v3"])
def test_halves_add_up_and_batches_do_not_matter(tmp_path, kind):
    folder = save_kind(tmp_path / "m", kind)
    whole = measure(folder, batch_size=2)
    halves = measure(folder, DOCUMENTS[:2], batch_size=2) + measure(folder, DOCUMENTS[2:], batch_size=2)
    assert whole.tokens == halves.tokens == sum(map(len, DOCUMENTS))
    assert (whole.counts_LE == halves.counts_LE).all()
    for name in SUMS:
        np.testing.assert_allclose(getattr(halves, name), getattr(whole, name), rtol=1e-12, atol=1e-15)
    others = (measure(folder, batch_size=1), measure(folder, batch_size=5), measure(folder, DOCUMENTS[::-1]))
    for other in others:
        assert (whole.counts_LE == other.counts_LE).all()
        for name in SUMS:
            np.testing.assert_allclose(getattr(other, name), getattr(whole, name), rtol=1e-4, atol=1e-7)


def test_padding_is_not_counted(tmp_path):
    folder = save_kind(tmp_path / "m", "olmoe")
    together = measure(folder, [[7] * 30, [5]], batch_size=2)
    assert together.tokens == 31
    assert together.counts_LE.sum(axis=1).tolist() == [62, 62]
    np.testing.assert_allclose(together.probability_LE.sum(axis=1), 31, rtol=1e-6)


def test_layerwise_sees_the_layers_before_already_cut(tmp_path):
    folder = save_kind(tmp_path / "m", "olmoe")
    kept = (1, 4, 6)
    layerwise = measure(folder, layerwise=lambda _layer: kept)
    plain = measure(folder)
    assert (layerwise.counts_LE[0] == plain.counts_LE[0]).all()
    # The second layer's tokens come from a model whose first layer has the kept experts only.
    checkpoint = open_checkpoint(folder)
    source = describe(checkpoint, detect_moe(checkpoint))
    selection = select(folder, keep=3, method="random")
    cut_first = type(selection)(**{**vars(selection), "source": source, "kept": (kept, tuple(range(8)))})
    model = load(folder)
    probability = torch.zeros(8, dtype=torch.float64)
    router = model.model.layers[1].mlp.gate

    def count(_module, _args, output):
        probability.add_(output[0].double().softmax(-1).sum(0))

    router.register_forward_hook(count)
    with moesaic.restrict(model, cut_first), torch.no_grad():
        for document in DOCUMENTS:
            model(torch.tensor([document]), use_cache=False)
    np.testing.assert_allclose(layerwise.probability_LE[1], probability.numpy(), rtol=1e-5)
    assert np.abs(layerwise.probability_LE[1] - plain.probability_LE[1]).max() > 1e-3


def test_a_selection_from_a_file_says_everything(tmp_path, moe):
    selection = select(
        moe, tmp_path / "s.json", keep="25%", data=tmp_path / "math.jsonl", examples=5, stats_out=tmp_path / "st.json"
    )
    assert load_selection(tmp_path / "s.json") == selection
    assert selection.counts == (2, 2)
    statistics = load_statistics(tmp_path / "st.json")
    assert (statistics.domain, selection.details["domains"]) == ("math", {"math": statistics.tokens})
    for layer, ids in enumerate(selection.kept):
        scores = np.array(selection.scores[layer])
        assert set(ids) == set(np.argsort(-scores, kind="stable")[:2].tolist())
        mass = statistics.probability_LE[layer]
        assert selection.routing_mass_kept is not None
        assert selection.routing_mass_kept[layer] == pytest.approx(mass[list(ids)].sum() / mass.sum())
        unreached = np.flatnonzero(statistics.counts_LE[layer] == 0).tolist()
        assert selection.details["unreached"][layer] == unreached


@pytest.mark.parametrize("method", ["router", "easy_ep", "reap", "frequency", "random"])
def test_the_same_seed_gives_the_same_selection_and_every_method_can_be_extracted(tmp_path, moe, method):
    options = {"keep": 4, "data": tmp_path / "math.jsonl", "examples": 3, "method": method, "seed": 7}
    first, second = select(moe, **options), select(moe, **options)
    assert first == second
    extract(moe, first, tmp_path / "cut")
    assert load(tmp_path / "cut").config.num_experts == 4


def test_statistics_files_replace_the_pass_and_mix_domains(tmp_path, moe):
    for name in ("math", "code"):
        select(moe, keep=2, data=tmp_path / f"{name}.jsonl", stats_out=tmp_path / f"{name}.stats")
    parts = [load_statistics(tmp_path / f"{name}.stats").probability_LE for name in ("math", "code")]
    mixed = select(moe, keep=2, stats=[tmp_path / "math.stats", tmp_path / "code.stats"])
    expected = sum(part / part.sum(axis=1, keepdims=True) for part in parts)
    np.testing.assert_allclose(mixed.scores, expected, rtol=1e-12)
    again = select(moe, keep=2, stats=[tmp_path / "math.stats", tmp_path / "math.stats"])
    np.testing.assert_allclose(again.scores, parts[0] / parts[0].sum(axis=1, keepdims=True), rtol=1e-6)


def test_an_unreached_expert_scores_zero_and_is_reported(tmp_path, capsys):
    folder = save_kind(tmp_path / "m", "olmoe")
    save_tokenizer(folder)
    (tmp_path / "short.txt").write_text("a")
    selection = select(folder, keep=2, data=tmp_path / "short.txt", method="reap", quiet=False)
    assert [len(ids) for ids in selection.details["unreached"]] == [6, 6]
    for ids, scores in zip(selection.details["unreached"], selection.scores, strict=True):
        assert all(scores[expert] == 0.0 for expert in ids)
    assert "12 of 16 experts were selected by no calibration token" in capsys.readouterr().err


def run(*arguments, capsys):
    status = cli.run([str(argument) for argument in arguments])
    return status, *capsys.readouterr()


def test_the_command_line_from_select_to_merge_back(tmp_path, moe, capsys):
    def call(*arguments):
        status, out, err = run(*arguments, "--json", "--quiet", capsys=capsys)
        assert (status, err) == (0, "")
        return json.loads(out)

    math, code = tmp_path / "math.json", tmp_path / "code.json"
    for out in (math, code):
        call("select", moe, out, "--data", out.with_suffix(".jsonl"), "--keep", "4", "--examples", "5", "--shots", "2")
    compared = call("select", "--compare", math, code)
    assert [row["layer"] for row in compared["layers"]] == [0, 1]
    both = call("select", "--union", math, code, tmp_path / "both.json")["selections"][0]
    assert both["experts"] == max(8 - row["common"] for row in compared["layers"])
    assert call("extract", moe, math, tmp_path / "cut")["experts"] == 4
    assert call("merge-back", moe, tmp_path / "cut", tmp_path / "full", "--with", "router,other")["experts"] == 8
    options = ("--max-new-tokens", "6", "--dtype", "float32")
    masked = call("generate", moe, "abc", "--selection", math, *options)
    assert masked == call("generate", tmp_path / "cut", "abc", *options)


def test_one_selection_per_category(tmp_path, moe, capsys):
    rows = [
        {"question": f"q {i} x", "choices": ["a b", "c d"], "answer": i % 2, "subject": "ab"[i % 2]} for i in range(20)
    ]
    (tmp_path / "mc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["select", moe, tmp_path / "by", "--data", tmp_path / "mc.jsonl", "--by", "subject", "--keep", "4"]
    status, _, err = run(*arguments, "--split", "0.6", "--quiet", capsys=capsys)
    assert (status, err) == (0, "")
    made = {path.name: load_selection(path) for path in (tmp_path / "by").iterdir()}
    assert sorted(made) == ["a.json", "b.json"]
    assert made["a.json"].details["data"]["only"] == ["subject", "a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 9}, "--keep 9: must be from 1 to 8"),
        ({"keep": "0%"}, "--keep 0%: must be from 1 to 8"),
        ({"keep": "many"}, "--keep many: not a number of experts"),
        ({"keep": 1}, r"--keep 1: keeps 1 experts, but each token uses 2; .*--top-k 1"),
        ({"data": None}, "--method router: needs calibration text"),
        ({"examples": 0}, "--examples 0: must be at least 1"),
        ({"shots": 20}, "--shots 20: .* has 20 usable records"),
        ({"only": ("text", "nothing")}, "the calibration set is empty"),
        ({"template": "{question}"}, r"math\.jsonl:1: no field 'question'; the record has text"),
        (
            {"method": "best"},
            "method: 'best' is not allowed: one of 'router', 'easy_ep', 'reap', 'frequency', 'random'",
        ),
        ({"layerwise": True, "stats_out": "x.json"}, "--layerwise: scores belong to"),
    ],
)
def test_refusals(tmp_path, moe, options, message):
    with pytest.raises(MoesaicError, match=message):
        select(moe, tmp_path / "out.json", **({"keep": 4, "data": tmp_path / "math.jsonl"} | options))
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": "folder"}, "folder: is a folder; name a file"),
        ({"out": "file/s.json"}, r"s\.json: .*/file is a file, not a folder"),
        ({"out": "s.json", "stats_out": "folder"}, "folder: is a folder; name a file"),
        ({"out": "math.jsonl"}, r"math\.jsonl: exists and is no moesaic-selection file"),
        ({"out": "moe/config.json"}, r"config\.json: exists and is no moesaic-selection file"),
        ({"out": "s.json", "stats_out": "math.jsonl"}, "is no moesaic-statistics file"),
        ({"out": "s.json", "stats_out": "s.json"}, "is the selection's own file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_pass(tmp_path, moe, options, message, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        "moesaic.selection.collect.collect_statistics", lambda *_args, **_options: pytest.fail("scored")
    )
    targets = {name: tmp_path / value for name, value in options.items()}
    with pytest.raises(MoesaicError, match=message):
        select(moe, keep=4, data=tmp_path / "math.jsonl", **targets)
    assert not (tmp_path / "s.json").exists()


def test_a_category_without_a_record_in_the_split_is_refused_before_the_first_is_scored(tmp_path, moe, capsys):
    rows = [{"text": f"one two {i}", "subject": "rare" if i == 19 else "common"} for i in range(20)]
    (tmp_path / "mc.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not in_split(record_digest(rows[19]), share=0.3, seed=0)
    arguments = ["select", moe, tmp_path / "by", "--data", tmp_path / "mc.jsonl", "--by", "subject", "--keep", "4"]
    status, _, err = run(*arguments, "--split", "0.3", capsys=capsys)
    assert status == 2
    assert "is empty: no record with subject = rare in the share of --split 0.3 has any text" in err
    assert not (tmp_path / "by").exists()


def test_texts_are_cut_where_the_model_s_training_ended(tmp_path, capsys):
    folder = save_tokenizer(save_tiny_moe(tmp_path / "short", "qwen3_moe", max_position_embeddings=16))
    (tmp_path / "long.txt").write_text("abc " * 50)
    options = {"keep": 4, "data": tmp_path / "long.txt", "quiet": False}
    assert select(folder, **options).details["domains"] == {"long": 16}
    assert "at least 16 tokens, the most that the model was trained for" in capsys.readouterr().err
    assert select(folder, **options, max_tokens=9).details["domains"] == {"long": 9}
    assert "at least 9 tokens: only these count" in capsys.readouterr().err


def test_data_that_is_all_padding_or_empty_is_refused(tmp_path, moe):
    (tmp_path / "pad.jsonl").write_text('{"text": "<pad><pad>"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(MoesaicError, match=r"pad\.jsonl: all tokens of the calibration set are padding"):
        select(moe, keep=4, data=tmp_path / "pad.jsonl")
    with pytest.raises(MoesaicError, match=r"empty\.jsonl: the calibration set is empty"):
        select(moe, keep=4, data=tmp_path / "empty.jsonl")


def test_statistics_of_another_model_are_refused(tmp_path, moe):
    select(moe, keep=4, data=tmp_path / "math.jsonl", stats_out=tmp_path / "st.json")
    other = save_tiny_moe(tmp_path / "other", "qwen3_moe", seed=1)
    with pytest.raises(MoesaicError, match=r"st\.json: was made for .*moe with other weights"):
        select(other, keep=4, stats=[tmp_path / "st.json"])


def test_generate_refuses_a_selection_of_another_model(tmp_path, moe):
    other = save_tiny_moe(tmp_path / "other", "qwen3_moe", seed=1)
    select(other, tmp_path / "s.json", keep=4, method="random")
    with pytest.raises(MoesaicError, match=r"s\.json: was made for .*other with other weights"):
        moesaic.generate(moe, "abc", selection=tmp_path / "s.json")


def record(folder):
    return json.loads((folder / "moesaic.json").read_text())


def test_a_trained_subset_carries_the_ids_of_its_experts(tmp_path, moe):
    """Whatever becomes of the folder that it was trained from."""
    extract(moe, select(moe, keep=4, method="random", seed=1), tmp_path / "cut")
    ids = record(tmp_path / "cut")["experts"]["original"]
    recipe = tiny_recipe(tmp_path / "data", model=str(tmp_path / "cut"), tokenizer=None)
    moesaic.train(recipe, tmp_path / "trained", quiet=True)
    extract(moe, select(moe, keep=4, method="random", seed=2), tmp_path / "cut", overwrite=True)
    assert record(tmp_path / "cut")["experts"]["original"] != ids
    moesaic.merge_back(moe, tmp_path / "trained", tmp_path / "full")
    full, trained = (load(tmp_path / name).state_dict() for name in ("full", "trained"))
    for layer, kept in enumerate(ids):
        name = f"model.layers.{layer}.mlp.experts.down_proj"
        assert torch.equal(full[name][kept], trained[name])


def test_layers_for_multi_token_prediction_are_left_out_of_a_subset(tmp_path, moe):
    """Checkpoints of DeepSeek-V3 and GLM-4.5 store one behind the last layer, which transformers does not load."""
    full = save_tokenizer(save_tiny_moe(tmp_path / "full", "deepseek_v3", vocab_size=VOCABULARY, n_group=2))
    tensors = load_file(full / "model.safetensors")
    more = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items() if "layers.1." in n}
    save_file(tensors | more, full / "model.safetensors", metadata={"format": "pt"})
    file = full / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    selection = select(full, keep=4, data=tmp_path / "math.jsonl", examples=3)
    assert selection.source.layers == (1,)
    extract(full, selection, tmp_path / "cut")
    cut = load_file(tmp_path / "cut" / "model.safetensors")
    assert not any("layers.2." in name for name in cut)
    assert json.loads((tmp_path / "cut" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    model = load(full)
    with moesaic.restrict(model, selection):
        masked = model(torch.arange(3, 20)[None], use_cache=False).logits
    torch.testing.assert_close(load(tmp_path / "cut")(torch.arange(3, 20)[None], use_cache=False).logits, masked)
    moesaic.merge_back(full, tmp_path / "cut", tmp_path / "back", parts=("router", "shared", "other"))
    back = load_file(tmp_path / "back" / "model.safetensors")
    before = load_file(full / "model.safetensors")
    assert back.keys() == before.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())
    moesaic.inspect(full, tmp_path / "seen", data=tmp_path / "math.jsonl", min_length=1, clusters=2)


def test_a_subset_is_trained_and_comes_back(tmp_path, moe):
    selection = select(moe, keep=4, data=tmp_path / "math.jsonl", examples=5)
    extract(moe, selection, tmp_path / "cut")
    recipe = tiny_recipe(tmp_path / "data", model=str(tmp_path / "cut"), tokenizer=None)
    moesaic.train(recipe, tmp_path / "trained", quiet=True)
    moesaic.merge_back(moe, tmp_path / "trained", tmp_path / "full", parts=("router",))
    before, tuned, after = (load(tmp_path / name).state_dict() for name in ("moe", "trained", "full"))
    for layer, ids in enumerate(selection.kept):
        rest = [expert for expert in range(8) if expert not in ids]
        for part in ("experts.gate_up_proj", "experts.down_proj", "gate.weight"):
            name = f"model.layers.{layer}.mlp.{part}"
            assert torch.equal(after[name][list(ids)], tuned[name])
            assert torch.equal(after[name][rest], before[name][rest])
            assert not torch.equal(after[name][list(ids)], before[name][list(ids)])


def test_a_lowered_top_k_goes_with_the_selection(tmp_path, moe):
    options = {"keep": 1, "data": tmp_path / "math.jsonl", "examples": 3, "layerwise": True}
    selection = select(moe, tmp_path / "s.json", top_k=1, **options)
    assert extract(moe, tmp_path / "s.json", tmp_path / "cut").top_k == 1
    assert load(tmp_path / "cut").config.num_experts_per_tok == 1
    masked = moesaic.generate(moe, "abc", selection=tmp_path / "s.json", max_new_tokens=4)
    assert masked == moesaic.generate(tmp_path / "cut", "abc", max_new_tokens=4)
    with pytest.raises(MoesaicError, match=r"details\.top_k must be from 1 to 2, got 5"):
        type(selection)(**{**vars(selection), "details": {"top_k": 5}})
