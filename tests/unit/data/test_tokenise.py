import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data import tokenise as module
from moesaic.data.cache import Document, cache_root, open_cache, write_cache
from moesaic.data.recipe import DataRecipe, SourceRecipe
from moesaic.data.tokenise import Encoder, prepare, tokenise

TEXTS = [f"The quick brown fox {index} jumps" + " over" * (index % 40) for index in range(500)]


@pytest.fixture
def corpus(write_jsonl) -> Path:
    return write_jsonl("a.jsonl", [{"text": text, "other": text[::-1]} for text in TEXTS])


def source(path, **options) -> SourceRecipe:
    return SourceRecipe(path=str(path), domain="d", **options)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_cache_holds_what_the_tokenizer_gives(corpus, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 1000)
    cache = tokenise(source(corpus), Encoder(tokenizer), tmp_path / "cache")
    assert cache.tokens.dtype == np.uint16
    assert cache.num_documents == len(TEXTS)
    for index, text in enumerate(TEXTS):
        ids = cache.tokens[cache.offsets[index] : cache.offsets[index + 1]]
        assert ids.tolist() == [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    assert cache.masked(0, cache.num_tokens) == []


def test_prompts_are_spans_of_the_token_file(write_jsonl, tokenizer, tmp_path):
    file = write_jsonl("a.jsonl", [{"p": "Two and two", "c": text} for text in TEXTS[:50]])
    cache = tokenise(source(file, prompt="p", completion="c"), Encoder(tokenizer), tmp_path / "cache")
    assert cache.masked_from.tolist() == cache.offsets[:-1].tolist()
    for start, stop in zip(cache.masked_from, cache.masked_to, strict=True):
        assert tokenizer.decode(cache.tokens[start:stop]) == "Two and two"


def test_masked_spans_are_clipped_to_the_range(tmp_path):
    documents = [Document(ids=np.arange(10), masked=((0, 3), (5, 7))), Document(ids=np.arange(4), masked=((1, 4),))]
    cache = write_cache(tmp_path / "c", documents, vocab_size=100, meta={})
    assert cache.masked(0, 14) == [(0, 3), (5, 7), (11, 14)]
    assert cache.masked(2, 6) == [(2, 3), (5, 6)]
    assert cache.masked(3, 5) == []
    assert cache.masked(7, 12) == [(11, 12)]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_token_type_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    cache = write_cache(tmp_path / "c", [Document(ids=np.array([vocab_size - 1]))], vocab_size=vocab_size, meta={})
    assert cache.tokens.dtype == dtype
    assert cache.tokens.tolist() == [vocab_size - 1]


def test_it_is_made_once(corpus, tokenizer, tmp_path, monkeypatch):
    root = tmp_path / "cache"
    first = tokenise(source(corpus), Encoder(tokenizer), root)
    monkeypatch.setattr(module, "write_cache", lambda *_args, **_kwargs: pytest.fail("tokenised again"))
    again = tokenise(source(corpus), Encoder(tokenizer), root)
    assert again.folder == first.folder
    moved = corpus.rename(corpus.with_name("moved.jsonl"))
    assert tokenise(source(moved), Encoder(tokenizer), root).folder == first.folder
    assert folders(root) == [first.folder.name]


def test_anything_that_matters_makes_another_cache(corpus, tokenizer, new_tokenizer, write_jsonl, tmp_path):
    root = tmp_path / "cache"
    made = [tokenise(source(corpus), Encoder(tokenizer), root).folder]
    content = bytearray(corpus.read_bytes())
    stat = corpus.stat()
    content[content.index(b"quick")] = ord("Q")
    corpus.write_bytes(content)
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time, one other byte
    made.append(tokenise(source(corpus), Encoder(tokenizer), root).folder)
    made.append(tokenise(source(corpus, text="other"), Encoder(tokenizer), root).folder)
    made.append(tokenise(source(corpus, format="text"), Encoder(tokenizer), root).folder)
    made.append(tokenise(source(corpus), Encoder(new_tokenizer(extra="quick brown " * 9)), root).folder)
    made.append(tokenise(source(corpus), Encoder(new_tokenizer(eos="<|im_end|>")), root).folder)
    made.append(tokenise(source(corpus, prompt="text", completion="other"), Encoder(tokenizer), root).folder)
    made.append(tokenise(source(corpus, prompt="other", completion="text"), Encoder(tokenizer), root).folder)
    assert len(set(made)) == len(made)


def test_the_chat_template_matters_only_to_chats(write_jsonl, new_tokenizer, tmp_path):
    messages = [{"role": "user", "content": "Two"}, {"role": "assistant", "content": "four"}]
    file = write_jsonl("a.jsonl", [{"messages": messages, "text": "a"}])
    plain, other = new_tokenizer(), new_tokenizer()
    other.chat_template = plain.chat_template.replace("{{ m.role }}", "{{ m.role }}!").replace(
        "assistant", "assistant!"
    )
    chats = {tokenise(source(file, messages="messages"), Encoder(t), tmp_path / "c").folder for t in (plain, other)}
    texts = {tokenise(source(file), Encoder(t), tmp_path / "c").folder for t in (plain, other)}
    assert (len(chats), len(texts)) == (2, 1)


def test_a_tokenizer_has_the_same_fingerprint_after_saving(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert Encoder(loaded).fingerprint == Encoder(tokenizer).fingerprint


def test_folders_are_hashed_file_by_file(tokenizer, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("Two and")
    (data / "b.txt").write_text(" two")
    first = tokenise(source(data), Encoder(tokenizer), tmp_path / "c")
    (data / "a.txt").write_text("Two")
    (data / "b.txt").write_text(" and two")
    second = tokenise(source(data), Encoder(tokenizer), tmp_path / "c")
    assert first.folder != second.folder
    assert (first.num_documents, second.num_documents) == (2, 2)


def test_mistakes_in_the_data_leave_nothing(write_jsonl, tokenizer, tmp_path):
    file = write_jsonl("a.jsonl", [{"text": "a"}] * 5000 + [{"body": "b"}])
    with pytest.raises(MoesaicError, match=r"a.jsonl:5001: no field 'text'"):
        tokenise(source(file), Encoder(tokenizer), tmp_path / "c")
    assert folders(tmp_path / "c") == []


def test_empty_documents_are_left_out_and_counted(write_jsonl, tokenizer, tmp_path, capsys):
    file = write_jsonl("a.jsonl", [{"text": "a"}, {"text": ""}, {"text": ""}])
    assert tokenise(source(file), Encoder(tokenizer), tmp_path / "c").num_documents == 1
    assert "2 empty documents left out" in capsys.readouterr().err
    file = write_jsonl("b.jsonl", [{"text": ""}])
    with pytest.raises(MoesaicError, match=r"b.jsonl: no document with any text"):
        tokenise(source(file), Encoder(tokenizer), tmp_path / "c")


def test_data_that_changes_while_it_is_read_is_refused(corpus, tokenizer, tmp_path, monkeypatch):
    read = module.read_records

    def read_and_change(*arguments):
        yield from read(*arguments)
        corpus.write_bytes(corpus.read_bytes() + b'{"text": "late"}\n')

    monkeypatch.setattr(module, "read_records", read_and_change)
    with pytest.raises(MoesaicError, match=r"a.jsonl: the data changed while it was read"):
        tokenise(source(corpus), Encoder(tokenizer), tmp_path / "c")
    assert folders(tmp_path / "c") == []


def test_a_damaged_cache_is_refused(corpus, tokenizer, tmp_path):
    cache = tokenise(source(corpus), Encoder(tokenizer), tmp_path / "c")
    file = cache.folder / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(MoesaicError, match="was changed after it was written; delete the folder"):
        tokenise(source(corpus), Encoder(tokenizer), tmp_path / "c")
    file.unlink()
    with pytest.raises(MoesaicError, match="not a complete token cache"):
        open_cache(cache.folder)


def test_a_place_that_cannot_be_written_is_one_line(corpus, tokenizer, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MoesaicError, match=r"cannot write the token cache \(Not a directory\); set MOESAIC_CACHE"):
        tokenise(source(corpus), Encoder(tokenizer), tmp_path / "file" / "c")


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    from moesaic.data import cache as cache_module

    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "_sync", full)
    with pytest.raises(MoesaicError, match="No space left on device"):
        write_cache(tmp_path / "c" / "x", [Document(ids=np.arange(3))], vocab_size=9, meta={})
    assert folders(tmp_path / "c") == []


def _write(folder: str, barrier, results) -> None:
    def documents():
        for index in range(300):
            if index == 150:
                barrier.wait(30)  # both are in the middle at the same time
            yield Document(ids=np.arange(index + 1))

    cache = write_cache(Path(folder), documents(), vocab_size=400, meta={})
    results.put((cache.num_documents, int(cache.tokens.sum())))


def test_two_processes_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_write, args=(str(tmp_path / "c"), barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    assert found[0] == found[1] == (300, sum(sum(range(index + 1)) for index in range(300)))
    assert folders(tmp_path) == ["c"]


def test_a_kill_leaves_no_half_cache_and_its_leftovers_go(tmp_path):
    code = f"""
        import time
        from pathlib import Path
        import numpy as np
        from moesaic.data.cache import Document, write_cache

        def documents():
            for index in range(10**9):
                yield Document(ids=np.arange(100))
                if index == 5000:
                    print("half", flush=True)
                    time.sleep(600)

        write_cache(Path({str(tmp_path / "c")!r}), documents(), vocab_size=200, meta={{}})
    """
    worker = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "half\n"
    (leftover,) = folders(tmp_path)
    assert leftover.startswith(".c.")
    running = write_cache(tmp_path / "c", [Document(ids=np.arange(3))], vocab_size=200, meta={})
    assert folders(tmp_path) == [leftover, "c"]  # that of a running process stays
    for file in running.folder.iterdir():
        file.unlink()
    running.folder.rmdir()
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert folders(tmp_path) == [leftover]
    write_cache(tmp_path / "c", [Document(ids=np.arange(3))], vocab_size=200, meta={})
    assert folders(tmp_path) == ["c"]


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("MOESAIC_CACHE", raising=False)
    assert cache_root() == Path.home() / ".cache" / "moesaic"
    monkeypatch.setenv("MOESAIC_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    assert cache_root("elsewhere") == Path("elsewhere")


def test_prepare_makes_every_source(corpus, write_jsonl, tokenizer, tmp_path, capsys):
    held_out = write_jsonl("v.jsonl", [{"text": "Two and two"}])
    recipe = DataRecipe(sequence_length=16, sources=(source(corpus),), validation=(source(held_out),))
    data = prepare(recipe, tokenizer, cache_dir=tmp_path / "cache", quiet=True)
    assert open_cache(data.sources[0]).num_documents == len(TEXTS)
    assert open_cache(data.validation[0]).num_documents == 1
    assert data.padding_id == tokenizer.pad_token_id
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tokenizer, tmp_path):
    """Peak memory of tokenising 2 MB and 16 MB of text, each in a process of its own."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    line = json.dumps({"text": "The quick brown fox jumps over the lazy dog. " * 20}) + "\n"
    peaks = []
    for megabytes in (2, 16):
        file = tmp_path / f"{megabytes}.jsonl.gz"
        with gzip.open(file, "wt", compresslevel=1) as out:
            for _ in range(megabytes * 1_000_000 // len(line)):
                out.write(line)
        code = f"""
            from pathlib import Path
            from transformers import AutoTokenizer
            from moesaic.data import tokenise as module
            from moesaic.data.tokenise import Encoder
            from moesaic.data.recipe import SourceRecipe

            module.BATCH_CHARACTERS = 100_000
            source = SourceRecipe(path={str(file)!r}, domain="d")
            encoder = Encoder(AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r}))
            module.tokenise(source, encoder, Path({str(tmp_path / "cache")!r}), quiet=True)
            peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
            print(int(peak.split()[1]) // 1024)
        """
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
        )
        peaks.append(int(result.stdout.split()[-1]))
    assert peaks[1] < peaks[0] + 40, peaks  # MB; the tokens of the larger one alone take more as Python integers


def test_the_corpus_at_hand(tokenizer, tmp_path):
    corpus = Path(__file__).parents[4] / "shared" / "data" / "corpus" / "math.valid.jsonl"
    if not corpus.exists():
        pytest.skip(f"{corpus} is not there")
    cache = tokenise(source(corpus), Encoder(tokenizer), tmp_path)
    assert cache.num_documents == 430
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    for index in (0, 200, 429):
        ids = cache.tokens[cache.offsets[index] : cache.offsets[index + 1]]
        assert tokenizer.decode(ids) == texts[index] + "<eos>"
