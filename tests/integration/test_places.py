"""Every verb that writes refuses an output that can be none, in one line, before it looks at anything else."""

import pytest

from moesaic.checkpoint.output import check_target
from moesaic.cli import app as cli
from moesaic.cli.verbs import COMMANDS
from moesaic.common.errors import MoesaicError
from moesaic.common.files import check_file
from moesaic.common.place import check_place

WRITERS = {
    "upcycle": "upcycle base OUT --method sparse --experts 4",
    "expand": "expand moe OUT --experts 8 --utility uniform",
    "select": "select moe OUT --data texts.jsonl --keep 2",
    "extract": "extract moe selection.json OUT",
    "merge-back": "merge-back moe subset OUT",
    "eval": "eval moe --out OUT",
    "train": "train train/laptop-emo-pretrain OUT",
    "export": "export moe OUT",
    "inspect": "inspect moe OUT --data texts.jsonl",
    "report": "report looked OUT",
}
"""Verb -> a command whose inputs are not there: what is refused first is OUT."""

OTHERS = [
    "upcycle base OUT --method sparse --experts 4 --dry-run",
    "expand moe OUT --experts 8 --utility uniform --dry-run",
    "train train/laptop-emo-pretrain OUT --dry-run",
    "train train/laptop-emo-pretrain OUT --resume",
    "train train/laptop-emo-pretrain OUT --overwrite",
    "export moe OUT --to gguf",
    "export moe OUT --overwrite",
    "select moe out.json --data texts.jsonl --keep 2 --stats-out OUT",
    "select --union a.json b.json OUT",
    "lab run emo OUT",
    "lab run emo OUT --dry-run",
    "lab report folder --html OUT",
]
"""Other ways in."""

PLACES = {
    "": "not the name of a new",
    ".": "not the name of a new",
    "..": "not the name of a new",
    "/": "not the name of a new",
    "there/..": "not the name of a new",
    "/dev/null": "is a device",
    "/proc/moesaic": "not on a disk",
    "a-file/out.json": "a-file is a file, not a folder",
    "n" * 300: "the name is too long",
}


def test_every_verb_that_writes_is_here():
    assert {name for name, one in COMMANDS.items() if "out" in (*one.arguments, *one.further)} == set(WRITERS)


@pytest.mark.parametrize("line", [*WRITERS.values(), *OTHERS])
def test_an_output_that_can_be_none_is_refused_first(line, tmp_path, monkeypatch, capsys):
    (tmp_path / "a-file").touch()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for place, said in PLACES.items():
        status = cli.run([place if word == "OUT" else word for word in line.split()])
        out, err = capsys.readouterr()
        assert (status, out) == (2, ""), place
        assert err.startswith("moesaic: error: "), (place, err)
        assert err.count("\n") == 1, (place, err)
        assert said in err, (place, err)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_may_not_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moesaic.common.place.os.access", lambda *_: False)  # root may write everywhere
    for check in (check_place, check_target, lambda path: check_file(path, replaces="moesaic-results")):
        with pytest.raises(MoesaicError, match="permission denied in"):
            check(tmp_path / "new" / "out")


def test_what_can_be_an_output_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for place in ("new", "./new", "new/deeper/", "there", "there/../new", "...", ".hidden", "ü n"):
        assert check_place(place).is_relative_to(tmp_path)
