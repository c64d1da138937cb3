"""Every line of "Bad input" of issues 4 (expand) and 5 (experts to keep): one line, exit 2, nothing written."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.cli import app as cli
from tests.tiny_models import save_tiny
from tests.tiny_moes import save_tiny_moe
from tests.tiny_training import save_tokenizer, write_documents


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """`moe`, `other` (other weights), `smaller` (other shape), `subset` of `other`, and what is wrong in the rest."""
    folder = tmp_path_factory.mktemp("models")
    save_tokenizer(save_tiny(folder / "dense", "llama"))
    for name, options in {"moe": {}, "other": {"seed": 1}, "smaller": {"num_experts": 4}}.items():
        save_tokenizer(save_tiny_moe(folder / name, "olmoe", **options))
    write_documents(folder / "text.jsonl", "math", number=8, seed=0)
    (folder / "empty.jsonl").write_text('{"text": ""}\n')
    (folder / "padding.jsonl").write_text('{"text": "<pad><pad>"}\n')
    for name in ("moe", "other"):
        run("select", folder / name, folder / f"{name}.json", "--keep", "4", "--method", "random")
    uneven = json.loads((folder / "moe.json").read_text())
    uneven["kept"] = [[0, 1], [0, 1, 2]]
    (folder / "uneven.json").write_text(json.dumps(uneven))
    few = uneven | {"kept": [[0], [1]]}
    (folder / "few.json").write_text(json.dumps(few))
    run("extract", folder / "other", folder / "other.json", folder / "subset")
    _change(folder / "moe", folder / "extra", lambda tensors: tensors.update(_extra(tensors)))
    _change(folder / "moe", folder / "flat", _flatten)
    return folder


def run(*arguments):
    return cli.run([str(argument) for argument in (*arguments, "--quiet")])


def _change(source, target, change):
    save_tokenizer(save_tiny_moe(target, "olmoe"))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _extra(tensors):
    own = {name: tensor for name, tensor in tensors.items() if "experts.0." in name}
    return {name.replace("experts.0.", "experts.8."): tensor.clone() for name, tensor in own.items()}


def _flatten(tensors):
    for name, tensor in tensors.items():
        if "layers.1.mlp.experts" in name:
            tensor.copy_(torch.zeros_like(tensor))


EXPAND = {
    "a dense model": ("dense OUT --experts 9", "'llama' is not an MoE family known here"),
    "a target smaller than E": ("moe OUT --experts 7", "has 8 experts already; give a larger number"),
    "a cap that cannot reach it": ("moe OUT --experts 20 --cap 1", "--cap 1.* largest count possible is 16"),
    "K' > E'": ("moe OUT --experts 9 --top-k 10", "--top-k 10: there are 9 experts"),
    "no usable token": ("moe OUT --experts 9 --calibration empty.jsonl", r"empty\.jsonl"),
    "gradients that are all zero": (
        "flat OUT --experts 9 --calibration text.jsonl --sequence-length 32",
        r"all experts of layer 1 are 0 \(gradient_norm\)",
    ),
    "unmatched keys": ("extra OUT --experts 9", r"experts\.8\.\w+\.weight is there, but config\.json says 8 experts"),
}
SELECT = {
    "keep > E": ("moe OUT --keep 9 --data text.jsonl", "--keep 9: must be from 1 to 8"),
    "keep < K": ("moe OUT --keep 1 --data text.jsonl", "keeps 1 experts, but each token uses 2; .*--top-k 1"),
    "an empty calibration set": ("moe OUT --keep 4 --data empty.jsonl", "the calibration set is empty"),
    "only padding": ("moe OUT --keep 4 --data padding.jsonl", "all tokens of the calibration set are padding"),
}
EXTRACT = {
    "another shape": ("smaller moe.json OUT", r"num_experts 8, but .*smaller has 4"),
    "another hash": ("other moe.json OUT", r"moe\.json: was made for .*moe with other weights"),
    "uneven counts": ("moe uneven.json OUT", "keeps 2 to 3 experts depending on the layer.*all other families"),
    "fewer than K": ("moe few.json OUT", "keeps 1 experts, but each token uses 2; .*--top-k 1"),
}
MERGE_BACK = {"another parent": ("moe subset OUT", r"subset: was extracted from .*other \(hash \w+\), not from .*moe")}

CASES = [
    pytest.param(verb, line, message, id=f"{verb}: {name}")
    for verb, cases in {"expand": EXPAND, "select": SELECT, "extract": EXTRACT, "merge-back": MERGE_BACK}.items()
    for name, (line, message) in cases.items()
]


@pytest.mark.parametrize(("verb", "line", "message"), CASES)
def test_bad_input_is_one_line(models, tmp_path, monkeypatch, capsys, verb, line, message):
    monkeypatch.chdir(models)
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "results" / "out"
    target.parent.mkdir()
    assert run(verb, *(target if word == "OUT" else word for word in line.split())) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err), err
    assert list(target.parent.iterdir()) == []
