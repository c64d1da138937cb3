"""Commands from recipe classes: what is read, where it goes, what is said of mistakes. One made-up verb shows all."""

import inspect
import json
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from cyclopts import App, Parameter

from moesaic.cli.build import Command, Option, build
from moesaic.common.errors import MoesaicError
from moesaic.common.verbs import verb


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    size: int = 1


@dataclass(frozen=True, kw_only=True)
class MakeRecipe:
    """What to make."""

    source: str
    """Folder."""
    count: int | None = None
    """How many. Default: all."""
    mode: Literal["fast", "exact"] = "fast"
    """How."""
    ratio: float = 0.5
    """Share."""
    names: tuple[str, ...] = ()
    """Names of them."""
    parts: tuple[Part, ...] = ()
    """What it is made of."""
    strict: bool = False
    """Refuse more."""
    tokens: str | int = "1M"
    """So many."""

    def __post_init__(self) -> None:
        if self.count == 0:
            raise MoesaicError("count must be at least 1, got 0")
        if self.ratio > 1:
            raise MoesaicError(f"--ratio {self.ratio}: is too much")


class Made:
    """A result that says what it was made of."""

    def __init__(self, **values: Any):
        self.values = values
        self.ok = values["recipe"].mode == "fast"

    def lines(self) -> list[str]:
        return [f"made {self.values['out']}"]

    def to_dict(self) -> dict[str, Any]:
        return {key: str(value) for key, value in self.values.items()} | vars(self.values["recipe"])


@verb(MakeRecipe, positional=("source",), out="folder")
def make(
    recipe: MakeRecipe, out: str, *, overwrite: bool = False, quiet: bool = True, workers: int | None = None
) -> Made:
    """Make it."""
    return Made(recipe=recipe, out=out, overwrite=overwrite, quiet=quiet, workers=workers)


COMMAND = Command(
    about="Make it.",
    usage="moesaic make SOURCE OUT",
    examples="",
    recipe=f"{__name__}:MakeRecipe",
    run=f"{__name__}:make",
    arguments=("source", "out"),
    run_options=("overwrite", "workers"),
    options={"strict": Option(flag="--severe"), "source": Option(metavar="SRC")},
)


@pytest.fixture
def call(capsys, monkeypatch):
    monkeypatch.setattr("moesaic.cli.build.named", lambda path: globals().get(path.partition(":")[2]) or _printed)
    app = App(result_action="return_value", default_parameter=Parameter(negative=()))
    app.command(build("make", COMMAND), name="make")

    def run(line):
        status = app(line.split(), exit_on_error=False, print_error=False)
        return status, json.loads(capsys.readouterr().out)

    return run


def _printed(call):
    from moesaic.cli.build import call_and_print

    return call_and_print(call)


def test_flags_are_keys_of_the_recipe(call):
    status, made = call("make a b --count 2 --mode fast --ratio 0.25 --names x --names y --severe --tokens 5k --json")
    assert status == 0
    expected = {"source": "a", "out": "b", "count": 2, "ratio": 0.25, "names": ["x", "y"], "strict": True}
    assert expected.items() <= made.items()
    assert (made["tokens"], made["overwrite"], made["quiet"], made["workers"]) == ("5k", "False", "False", "None")


def test_options_of_the_run_are_no_keys(call):
    _, made = call("make a b --overwrite --workers 3 --quiet --json")
    assert (made["overwrite"], made["quiet"], made["workers"]) == ("True", "True", "3")


def test_a_check_that_fails_is_status_1(call):
    assert call("make a b --mode exact --json")[0] == 1


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("source: from-file\ncount: 5\nmode: exact\nparts: [{name: a}, {name: b}]\n")
    return path


def test_flags_win_over_set_which_wins_over_the_file(call, file):
    made = call(f"make --config {file} b --set count=6 --set parts.1.size=9 --set ratio=0.1 --ratio 0.2 --json")[1]
    assert (made["source"], made["out"], made["count"], made["ratio"]) == ("from-file", "b", 6, 0.2)
    assert made["parts"] == [str(Part(name="a")), str(Part(name="b", size=9))]
    made = call(f"make a b --config {file} --json")[1]
    assert (made["source"], made["out"], made["mode"]) == ("a", "b", "exact")


def test_set_without_a_file(call):
    assert call("make a b --set mode=exact --json")[0] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("make", 'Command "make" parameter SRC requires an argument.'),
        ("make a", 'Command "make" parameter OUT requires an argument.'),
        ("make --config FILE", 'Command "make" parameter OUT requires an argument.'),
        ("make a b --count 0", "--count: must be at least 1, got 0"),
        ("make a b --ratio 2", "--ratio 2.0: is too much"),
        ("make a b --set count=0", "--set: count: must be at least 1, got 0"),
        ("make a b --set cuont=1", "--set: cuont: unknown key; did you mean 'count'?"),
        ("make --config FILE b --set count=0", "--set: count: must be at least 1, got 0"),
        ("make --config FILE b --count 0", "--count: must be at least 1, got 0"),
        ("make a b --workers 0", "--workers: must be a whole number of at least 1, got 0"),
    ],
)
def test_mistakes_name_what_the_user_wrote(call, file, line, message):
    with pytest.raises(MoesaicError) as caught:
        call(line.replace("FILE", str(file)))
    assert str(caught.value) == message


def test_mistakes_in_the_file_name_it(call, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("source: a\ncount: 0\n")
    with pytest.raises(MoesaicError, match=r"bad\.yaml: count: must be at least 1"):
        call(f"make --config {path} out")


def test_words_of_a_list_are_what_the_others_leave(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Joined:
        inputs: tuple[str, ...]
        """Files."""

    seen = []
    names = {"a:Recipe": Joined, "a:action": seen.append}
    monkeypatch.setattr("moesaic.cli.build.named", names.__getitem__)
    command = Command(
        about="",
        usage="",
        examples="",
        recipe="a:Recipe",
        run="",
        action="a:action",
        arguments=("inputs", "out"),
        words=("IN OUT", "Files."),
        missing={"arguments": "join: expected IN... OUT, got {count}"},
    )
    monkeypatch.setattr("moesaic.cli.build.field_docs", lambda _: {"inputs": "Files."})
    joined = build("join", command)
    joined("x", "y", "out")
    assert (seen[0].recipe, seen[0].out) == (Joined(inputs=("x", "y")), "out")
    with pytest.raises(MoesaicError, match=r"^join: expected IN... OUT, got 1$"):
        joined("x")
    assert list(inspect.signature(joined).parameters)[:2] == ["words", "config"]
