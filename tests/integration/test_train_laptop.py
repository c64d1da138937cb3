"""The laptop recipes run as they are, apart from the number of steps, on small files where they look for them."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import moesaic
from moesaic.recipes import shipped_recipes
from tests.tiny_models import save_tiny
from tests.tiny_training import VOCABULARY, save_tokenizer, write_documents

NAMES = [recipe.name for recipe in shipped_recipes() if recipe.name.startswith("train/laptop-")]
TEMPLATE = "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("laptop")
    save_tiny(folder / "base", "llama", vocab_size=VOCABULARY)
    save_tokenizer(folder / "base")
    save_tokenizer(folder / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "base")
    (folder / "corpus").mkdir()
    for domain in ("math", "code", "science", "general"):
        write_documents(folder / "corpus" / f"{domain}.train.jsonl", domain, number=100, seed=0)
        write_documents(folder / "corpus" / f"{domain}.valid.jsonl", domain, number=5, seed=1)
    turns = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
    (folder / "chats.jsonl").write_text(40 * (json.dumps({"messages": turns}) + "\n"))
    (folder / "task.jsonl").write_text(40 * (json.dumps({"question": "what. ", "answer": "this"}) + "\n"))
    (folder / "task.yaml").write_text("kind: generation\ndata: task.jsonl\ndemonstrations: task.jsonl\n")
    moesaic.upcycle(folder / "base", folder / "moe", method="virtual_group", experts=4, shards=2, top_k=2)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_laptop_recipe_runs(name, workplace, tmp_path, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.setenv("MOESAIC_CACHE", str(workplace / "cache"))
    if not Path("emo").exists():
        start = ["budget={steps: 1}", "optimizer.warmup_steps=0", "model.config.vocab_size=48", "data.validation=[]"]
        moesaic.train("train/laptop-emo-pretrain", "emo", settings=start)
        shutil.copytree("emo", "subset")
    settings = ["budget={steps: 2}", "optimizer.warmup_steps=1", "batch={tokens: 512, micro_sequences: 1}"]
    result = moesaic.train(name, tmp_path / "out", settings=settings)
    assert result.steps in (1, 2)
    assert result.loss is not None
    assert moesaic.load(tmp_path / "out").config.vocab_size in (VOCABULARY, 8192)
