import gzip
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from moesaic.common.errors import MoesaicError
from moesaic.data import files as reading
from moesaic.data.files import READ_CHUNK, DataFile, find_files, hash_files, read_records
from moesaic.data.recipe import SourceRecipe

RECORDS = [{"text": f"Näme {index}" + "x" * (index * 37 % 500), "n": index} for index in range(700)]
PLAIN = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def read(path, fields=("text",), **options):
    files = find_files(SourceRecipe(path=str(path), domain="d", **options), quiet=True)
    return [record for file in files for record in read_records(file, fields, lambda _amount: None)]


def write_parquet(path, table):
    pyarrow.parquet.write_table(table, path, row_group_size=100)


def test_all_formats_give_the_same_records(tmp_path):
    assert len(PLAIN) > 2 * READ_CHUNK
    (tmp_path / "a.jsonl").write_bytes(PLAIN)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(PLAIN))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(PLAIN))
    half = PLAIN.index(b"\n", len(PLAIN) // 2) + 1
    (tmp_path / "d.ndjson.gz").write_bytes(gzip.compress(PLAIN[:half]) + gzip.compress(PLAIN[half:]))
    (tmp_path / "e.json.zst").write_bytes(zstandard.compress(PLAIN[:half]) + zstandard.compress(PLAIN[half:]))
    write_parquet(tmp_path / "f.parquet", pa.Table.from_pylist(RECORDS))
    for file in sorted(tmp_path.iterdir()):
        assert [record.fields["text"] for record in read(file)] == [record["text"] for record in RECORDS], file
    assert len(read(tmp_path)) == 6 * len(RECORDS)


def test_places_name_file_and_line(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n   \n{"text": "b"}')
    assert [record.where for record in read(file)] == [f"{file}:1", f"{file}:4"]
    table = tmp_path / "a.parquet"
    write_parquet(table, pa.table({"text": ["a", "b"], "other": [1, 2]}))
    assert [(record.where, record.fields) for record in read(table)] == [
        (f"{table}: row 1", {"text": "a"}),
        (f"{table}: row 2", {"text": "b"}),
    ]


def test_a_folder_of_text_files_is_one_document_each(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("second\nline")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / ".hidden.txt").write_text("not read")
    (tmp_path / "picture.png").write_bytes(b"not text")
    assert [record.fields["text"] for record in read(tmp_path)] == ["first", "third", "second\nline"]
    find_files(SourceRecipe(path=str(tmp_path), domain="d"))
    assert "reading 3 files, passing over 1 of other kinds" in capsys.readouterr().err
    (tmp_path / "picture.png").unlink()
    (tmp_path / "code.py").write_text("print()")
    assert len(read(tmp_path, format="text")) == 4


def test_an_empty_text_file_is_an_empty_document(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.txt").write_bytes(b"b")
    assert [record.fields["text"] for record in read(tmp_path)] == ["", "b"]


def test_ticks_add_up_to_the_bytes_on_disk(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(PLAIN))
    write_parquet(tmp_path / "b.parquet", pa.Table.from_pylist(RECORDS))
    for file in find_files(SourceRecipe(path=str(tmp_path), domain="d")):
        seen = []
        list(read_records(file, ("text",), seen.append))
        assert sum(seen) == pytest.approx(file.size)


BAD = {
    "bad json": ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2: not JSON"),
    "cut off": ("a.jsonl", b'{"text": "a"}\n{"text": "b', "a.jsonl:2: not JSON"),
    "deep": ("a.jsonl", b"[" * 200_000, "a.jsonl:1: not JSON"),
    "not an object": ("a.jsonl", b'{"text": "a"}\n["a"]\n', "a.jsonl:2: expected a JSON object, found list"),
    "not utf-8": ("a.jsonl", b'{"text": "a"}\n\n{"text": "\xff"}\n', "a.jsonl:3: not UTF-8 (invalid start byte"),
    "not utf-8 text": ("a.txt", b"abc\xff", "a.txt: not UTF-8 (invalid start byte at byte 3)"),
    "empty": ("a.jsonl", b"", "a.jsonl: the file is empty"),
    "cut gz": ("a.jsonl.gz", gzip.compress(PLAIN)[:-300], "a.jsonl.gz: the .gz file is cut off"),
    "cut gz trailer": ("a.jsonl.gz", gzip.compress(PLAIN)[:-1], "a.jsonl.gz: the .gz file is cut off"),
    "cut zst": ("a.jsonl.zst", zstandard.compress(PLAIN)[:-300], "a.jsonl.zst: the .zst file is cut off"),
    "wrong gz": ("a.jsonl.gz", PLAIN, "a.jsonl.gz: damaged .gz file"),
    "wrong zst": ("a.jsonl.zst", PLAIN, "a.jsonl.zst: damaged .zst file"),
    "wrong crc": ("a.txt.gz", gzip.compress(b"abc")[:-8] + bytes(8), "a.txt.gz: damaged .gz file"),
    "wrong parquet": ("a.parquet", PLAIN, "a.parquet: damaged or not parquet"),
    "unknown": ("a.csv", b"a,b", "a.csv: cannot tell the format from the name"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_with_the_place(tmp_path, case):
    name, content, message = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MoesaicError) as caught:
        read(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parquet_mistakes(tmp_path):
    file = tmp_path / "a.parquet"
    write_parquet(file, pa.table({"body": ["a"]}))
    with pytest.raises(MoesaicError, match=r"a.parquet: no field 'text'; the record has body"):
        read(file)
    data = bytearray(file.read_bytes())
    data[4:30] = bytes(26)
    file.write_bytes(data)
    with pytest.raises(MoesaicError, match=r"a.parquet: (damaged|cannot be read)"):
        read(file, fields=("body",))


@pytest.mark.parametrize("rows", [["x" * 3000], ["a"] * 40 + ["x" * 3000]], ids=["all of it", "one among many"])
def test_rows_of_parquet_are_bounded(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("moesaic.data.files.MOST_BYTES", 2 << 10)
    file = tmp_path / "a.parquet"
    write_parquet(file, pa.table({"text": rows}))
    with pytest.raises(MoesaicError, match=r"a.parquet(: row 41)?: the document has more than"):
        read(file)


def test_a_text_that_many_rows_of_parquet_share_is_not_unpacked_for_all_at_once(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    write_parquet(file, pa.table({"text": ["y" * 2000] * 90}))
    sizes = []
    iterate = pyarrow.parquet.ParquetFile.iter_batches
    counted = lambda table, **how: (sizes.append(batch.num_rows) or batch for batch in iterate(table, **how))  # noqa: E731
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", counted)
    monkeypatch.setattr("moesaic.data.files.PARQUET_BYTES", 20 << 10)
    assert len(read(file)) == 90
    assert max(sizes) * 2000 < 20 << 10


def test_parquet_with_bytes_that_are_not_utf8(tmp_path):
    file = tmp_path / "a.parquet"
    valid = pa.array([b"ok", b"\xff\xfe"], type=pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, valid.buffers())
    write_parquet(file, pa.table({"text": text}))
    with pytest.raises(MoesaicError, match=r"a.parquet: near row 1: not UTF-8"):
        read(file)


def test_nothing_to_read(tmp_path):
    with pytest.raises(MoesaicError, match="nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(MoesaicError, match="no data files in this folder"):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(PLAIN)
    file.chmod(0)
    with pytest.raises(MoesaicError, match="cannot be read"):
        read(file)


def test_a_file_that_vanishes(tmp_path):
    gone = DataFile(path=tmp_path / "gone.jsonl", format="jsonl", size=3)
    with pytest.raises(MoesaicError, match=r"gone.jsonl: cannot be read"):
        list(read_records(gone, ("text",), lambda _amount: None))
    with pytest.raises(MoesaicError, match=r"gone.jsonl: cannot be read"):
        hash_files((gone,), label="x", quiet=True)


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "a.parquet"), ("zstandard", "a.jsonl.zst")])
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, module, name):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MoesaicError, match=rf"{name}: .* need {module}; pip install 'moesaic\[train\]'"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_a_document_without_an_end_is_one_line_in_little_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 22)
    content = b'{"text": "first"}\n' + b"a" * (1 << 25)
    pack = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(content))
    del content
    (file,) = find_files(SourceRecipe(path=str(tmp_path / name), domain="d"))
    tracemalloc.start()
    with pytest.raises(MoesaicError, match="the document has more than 4 MiB; cut it") as caught:
        list(read_records(file, ("text",), lambda _amount: None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    place = f"{tmp_path / name}:2" if "jsonl" in name else str(tmp_path / name)
    assert str(caught.value).startswith(f"{place}: ")
    assert peak < 25 << 20  # far less than the 32 MiB of the line


def test_lines_of_any_number_take_little_memory(tmp_path):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b"\n" * (1 << 20) + b'{"text": "last"}'))
    (found,) = find_files(SourceRecipe(path=str(file), domain="d"))
    (record,) = read_records(found, ("text",), lambda _amount: None)
    assert record.where == f"{file}:{(1 << 20) + 1}"


def test_a_table_with_a_field_without_an_end_is_one_line(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('question,answer\na,b\n"' + "x" * 200_000)
    with pytest.raises(MoesaicError, match=r"a\.csv: after row 1: not a table with commas"):
        list(read_records(reading.rows_file(file), None, lambda _amount: None))
