"""The command line's contract: help, errors, exit status, one JSON document, nothing heavy imported without need.

Most tests call the application in this process; those about the process itself start one.
"""

import errno
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import moesaic
from moesaic.checkpoint import output
from moesaic.cli import app as cli
from moesaic.cli.verbs import COMMANDS
from moesaic.common.errors import MoesaicError
from moesaic.common.workers import MOST_WORKERS
from moesaic.recipes import shipped_recipes
from moesaic.upcycling.recipe import UpcycleRecipe
from tests.tiny_models import VOCABULARY, save_tiny

cli.mount_plugins()


def commands(app, before=""):
    """Every command that the application shows, those of its groups as well: `recipes`, `recipes list`, ..."""
    for name in app:
        if not name.startswith("-") and app[name].show:
            yield f"{before}{name}"
            yield from commands(app[name], f"{before}{name} ")


VERBS = list(commands(cli.app))
GROUPS = {verb.rpartition(" ")[0] for verb in VERBS} - {""}
"""Commands that only hold others; their help has the examples of all."""


@pytest.fixture
def call(capsys):
    """Run one command line in this process: (status, stdout, stderr)."""

    def run(*arguments):
        status = cli.run([str(argument) for argument in arguments])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def refusal(call):
    """Run a command line that must be refused; return its only line on stderr."""

    def run(*arguments):
        status, out, err = call(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("moesaic: error: ")
        assert err.count("\n") == 1
        return err.removeprefix("moesaic: error: ").rstrip("\n")

    return run


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A base and two specialists, with a tokenizer that has a token for every character."""
    folder = tmp_path_factory.mktemp("dense")
    characters = {chr(32 + index): index for index in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    for seed, name in enumerate(["base", "math", "code"]):
        save_tiny(folder / name, "llama", seed=seed)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def process(*arguments, **kwargs):
    command = [sys.executable, "-m", "moesaic", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(call, verb):
    status, out, err = call(*verb.split(), "--help")
    assert (status, err) == (0, "")
    assert out.startswith("Usage: moesaic")
    if verb not in GROUPS:
        assert "--json" in out
        assert "--quiet" in out
    if verb.rpartition(" ")[0] not in GROUPS:
        assert "Example" in out


def test_the_verbs_are_those_of_the_table():
    assert {*COMMANDS, "families", "recipes", "recipes list", "recipes show", "lab", "lab run"} <= set(VERBS)


def test_help_lists_every_verb(call):
    for arguments in ([], ["--help"]):
        status, out, _ = call(*arguments)
        assert status == 0
        assert all(f" {verb} " in out for verb in VERBS if " " not in verb)


def test_help_states_the_recipe_s_defaults(call):
    _, out, _ = call("upcycle", "--help")
    text = " ".join(out.replace("│", " ").split())
    recipe = UpcycleRecipe(base="b", method="sparse")
    for key in (
        "router_init",
        "router_std",
        "scale",
        "drop_ratio",
        "drop_indices",
        "layers",
        "dtype",
        "seed",
    ):
        option = text.partition(f"--{key.replace('_', '-')} ")[2].partition(" --")[0]
        assert f"[default: {getattr(recipe, key)}]" in option, key


def test_every_key_of_the_recipe_is_an_option(call):
    _, out, _ = call("upcycle", "--help")
    keys = set(UpcycleRecipe.__dataclass_fields__) - {"base", "specialists"} | {"specialist"}
    assert all(f"--{key.replace('_', '-')}" in out for key in keys)


@pytest.mark.parametrize("verb", ["upcycle", "expand"])
def test_help_says_how_many_threads_there_are_by_default(call, verb):
    assert f"[default: one per core, at most {MOST_WORKERS}]" in " ".join(
        call(verb, "--help")[1].replace("│", " ").split()
    )


def test_version(call):
    assert call("--version") == (0, f"{moesaic.__version__}\n", "")


@pytest.mark.parametrize(
    "lines", [["--help", "--version", "recipes list"], [f"{verb} --help" for verb in VERBS], ["plan BASE"]]
)
def test_light_verbs_import_nothing_heavy(lines, dense):
    calls = [line.replace("BASE", str(dense / "base")).split() for line in lines]
    code = f"""
import sys
from moesaic.cli.app import run
for arguments in {calls!r}:
    assert run(arguments) == 0
heavy = {{"torch", "transformers", "numpy", "datasets", "huggingface_hub", "pandas"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_verbs_that_move_bytes_do_without_transformers():
    """Two seconds at the start of every `expand`, `extract` and `merge-back`."""
    code = "import moesaic.expansion.run, moesaic.selection.extract, moesaic.selection.merge, sys"
    command = [sys.executable, "-c", f"{code}; sys.exit('transformers' in sys.modules)"]
    subprocess.run(command, check=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("upcyle a b", 'Unknown command "upcyle". Did you mean "upcycle"?'),
        ("recipes lst", 'Unknown command "lst". Did you mean "list"?'),
        ("upcycle a b --methd btx", "Unknown option: --methd. Did you mean --method?"),
        ("upcycle a b --bogus", "Unknown option: --bogus. `moesaic upcycle --help` lists all."),
        ("upcycle a b --expert-count 4", "Unknown option: --expert-count. Did you mean --experts?"),
        ("verify a b --batchsize 4", "Unknown option: --batchsize. Did you mean --batch-size?"),
        ("upcycle a b --method divmeo", 'Invalid value "divmeo" for --method.'),
        ("upcycle a b --method divmeo", 'Did you mean "divmoe"?'),
        ("upcycle a b --method btx --top-k two", 'Invalid value for --top-k: unable to convert "two" into int.'),
        ("upcycle a b --method btx --top-k", "--top-k requires an argument"),
        ("upcycle a b --method btx --top-k 0", "--top-k: must be at least 1, got 0"),
        ("upcycle a b --method btx --top-k 1 --top-k 2", "--top-k specified multiple times"),
        ("upcycle a b --method btx --router-std nan", "--router-std: expected a finite number, got nan"),
        ("upcycle a b --method btx --drop-ratio 2", "--drop-ratio: must be between 0 and 1"),
        ("upcycle a b --method btx --workers 0", "--workers: must be a whole number of at least 1, got 0"),
        ("upcycle a b --method btx --specialist math", "--specialist math: expected NAME=PATH, such as math="),
        ("upcycle a b --method btx --specialist =x", "--specialist =x: expected NAME=PATH"),
        ("upcycle a b --method btx --specialist x=", "--specialist x=: expected NAME=PATH"),
        ("upcycle a b --method btx --specialist x=1 --specialist x=2", "--specialist x=2: the name 'x' is given twice"),
        ("upcycle a b", "--method is needed: one of scratch, sparse, drop, virtual_group, btx, divmoe"),
        ("upcycle a --method btx", "BASE and OUT are both needed"),
        ("upcycle", "BASE and OUT are both needed"),
        ("upcycle a b c", "unexpected argument: c"),
        ("upcycle --config none.yaml out", "none.yaml: cannot be read: No such file or directory"),
        ("upcycle nowhere out --method sparse", "nowhere: no such folder"),
        ("verify nowhere there", "nowhere: no such folder"),
        ("verify a", "parameter TARGET requires an argument"),
        ("plan nowhere", "nowhere: no such folder"),
        ("plan none.yaml", "none.yaml: cannot be read"),
        ("generate nowhere hello", "nowhere: no such folder"),
        ("generate nowhere hello --batch-size 0", "--batch-size: must be at least 1, got 0"),
        ("generate nowhere hello --max-new-tokens 0", "--max-new-tokens: must be at least 1, got 0"),
        ("generate nowhere hello --temperature -1", "--temperature: must be 0 or more, got -1.0"),
        ("generate nowhere hello --dtype int8", 'Invalid value "int8" for --dtype.'),
        ("recipes show divmoe-quen3-4b", "divmoe-quen3-4b: no such recipe; did you mean 'divmoe-qwen3-4b'?"),
        ("recipes show zzz", "zzz: no such recipe; `moesaic recipes list` shows all"),
    ],
)
def test_mistakes_are_one_line(refusal, line, message):
    assert message in refusal(*line.split())


@pytest.mark.parametrize(
    "line",
    [
        "upcyle --json",
        "upcycle a b --methd x --json",
        "plan nowhere --json",
        "recipes show zzz --json",
        "verify a b --json",
    ],
)
def test_errors_are_json_too(call, line):
    status, out, err = call(*line.split())
    assert status == 2
    document = json.loads(out)
    assert list(document) == ["error"]
    assert err == f"moesaic: error: {document['error']}\n"


def test_mistake_in_a_recipe_names_file_and_key(refusal, tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text("base: b\nmethod: btx\ntop-k: 2\n")
    assert refusal("upcycle", "--config", file, "out") == f"{file}: top-k: unknown key; did you mean 'top_k'?"
    file.write_text("base: b\nmethod: btxx\n")
    assert "method: 'btxx' is not allowed: one of 'scratch'" in refusal("upcycle", "--config", file, "out")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (MoesaicError("two\nlines"), 2, "moesaic: error: two lines\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/out/x"),
            2,
            "moesaic: error: /out/x: No space left on device\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/out"), 2, "moesaic: error: /out: Permission denied\n"),
        (OSError("odd"), 2, "moesaic: error: odd\n"),
        (MemoryError(), 2, "moesaic: error: not enough memory\n"),
        (KeyboardInterrupt(), 130, "moesaic: interrupted: stopped by the user\n"),
    ],
)
def test_errors_from_below(call, monkeypatch, error, status, line):
    def fail(*_arguments, **_keywords):
        raise error

    monkeypatch.setattr("moesaic.planning.run.plan.run", fail)
    assert call("plan", "x") == (status, "", line)


def test_a_bug_is_named_as_one(call, monkeypatch):
    monkeypatch.setattr("moesaic.planning.run.plan.run", lambda *_arguments, **_keywords: [][0])
    status, out, err = call("plan", "x")
    assert (status, out) == (1, "")
    assert err.startswith("moesaic: internal error: IndexError: list index out of range (")
    assert err.count("\n") == 1
    monkeypatch.setenv("MOESAIC_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in call("plan", "x")[2]


def test_numbers_that_json_cannot_write_become_null(call, monkeypatch):
    class Report:
        def lines(self):
            return []

        def to_dict(self):
            return {"a": float("nan"), "b": [float("inf"), 1.0], "c": Path("x")}

    monkeypatch.setattr("moesaic.planning.run.plan.run", lambda *_arguments, **_keywords: Report())
    assert json.loads(call("plan", "x", "--json")[1]) == {"a": None, "b": [None, 1.0], "c": "x"}


# --- verbs at work ---------------------------------------------------------------------------------------------------


def specialists(dense):
    return ["--specialist", f"math={dense / 'math'}", "--specialist", f"code={dense / 'code'}"]


def test_upcycle_verify_plan_generate(call, dense, tmp_path):
    out = tmp_path / "moe"
    upcycle = ["upcycle", dense / "base", out, "--method", "divmoe", *specialists(dense), "--json"]
    status, stdout, _ = call(*upcycle, "--dry-run")
    assert status == 0
    assert json.loads(stdout)["out"] is None
    assert not out.exists()

    status, stdout, _ = call(*upcycle)
    assert status == 0
    assert json.loads(stdout)["experts"] == 4

    status, stdout, _ = call(*upcycle)  # it exists now
    assert status == 2
    assert "--overwrite" in json.loads(stdout)["error"]
    assert call(*upcycle, "--overwrite")[0] == 0

    status, stdout, stderr = call("verify", dense / "base", out, "--json", "--quiet")
    assert (status, stderr) == (0, "")
    assert json.loads(stdout)["ok"] is True

    status, stdout, _ = call("plan", out, "--json")
    assert status == 0
    assert json.loads(stdout)["parameters"]["num_experts"] == 4

    status, stdout, _ = call("generate", out, "hello", "--max-new-tokens", "4", "--json")
    assert status == 0
    document = json.loads(stdout)
    assert document["prompt"] == "hello"
    assert len(document["text"]) == 4
    assert call("generate", out, "hello", "--max-new-tokens", "4")[1] == f"hello{document['text']}\n"
    several = ["generate", out, "a longer prompt", "hello", "--max-new-tokens", "4", "--batch-size", "2", "--json"]
    assert json.loads(call(*several)[1])["results"][1] == document
    assert call("generate", out, "hello", "--max-new-tokens", "4", "--quiet")[1] == f"{document['text']}\n"


def test_generate_several(call, dense):
    def texts(*prompts):
        arguments = ("generate", dense / "base", *prompts, "--max-new-tokens", "4", "--batch-size", "2", "--json")
        return json.loads(call(*arguments)[1])

    one, two = texts("hello"), texts("a longer prompt")
    assert texts("hello", "a longer prompt") == {"results": [one, two]}
    printed = call("generate", dense / "base", "hello", "a longer prompt", "--max-new-tokens", "4", "--batch-size", "2")
    assert printed[1] == "".join(f"{result['prompt']}{result['text']}\n" for result in (one, two))


def test_options_win_over_the_recipe(call, dense, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"base: {dense / 'base'}\nmethod: virtual_group\nexperts: 4\nseed: 3\n")
    arguments = ["upcycle", "--config", recipe, tmp_path / "out", "--dry-run", "--json"]
    assert json.loads(call(*arguments)[1])["experts"] == 4
    assert json.loads(call(*arguments, "--experts", "6")[1])["experts"] == 6
    two_folders = ["upcycle", dense / "math", tmp_path / "out", "--config", recipe, "--dry-run", "--json"]
    assert call(*two_folders)[0] == 0


def test_quiet_prints_nothing(call, dense, tmp_path):
    assert call("upcycle", dense / "base", tmp_path / "out", "--method", "sparse", "--quiet") == (0, "", "")


def test_functions_do_the_same(dense, tmp_path):
    sources = {"math": dense / "math", "code": dense / "code"}
    result = moesaic.upcycle(dense / "base", tmp_path / "moe", method="divmoe", specialists=sources, top_k=2)
    assert result.to_dict()["experts"] == 4
    assert moesaic.verify(dense / "base", tmp_path / "moe", quiet=True).ok
    assert moesaic.plan(tmp_path / "moe").to_dict()["parameters"]["num_experts"] == 4
    model = moesaic.load(tmp_path / "moe")
    assert type(model).__name__ == "MoesaicLlamaForCausalLM"
    assert len(moesaic.generate(tmp_path / "moe", "a", max_new_tokens=3)) == 3
    with pytest.raises(MoesaicError, match=r"^upcycle\(\): top_kk: unknown key; did you mean 'top_k'"):
        moesaic.upcycle(dense / "base", tmp_path / "x", method="sparse", top_kk=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"specialists": ["math", "code"]}, r"upcycle\(\): specialists: expected short names and folders, such as"),
        ({"specialists": {"math": "x"}, "experts": "two"}, r"upcycle\(\): experts: expected a whole number"),
        ({"workers": "a"}, "--workers: must be a whole number of at least 1, got 'a'"),
        ({"workers": 1.5}, "--workers: must be a whole number of at least 1, got 1.5"),
        ({"router_std": None}, r"upcycle\(\): router_std: expected"),
        ({"method": "dimvoe"}, r"upcycle\(\): method: 'dimvoe' is not allowed"),
    ],
)
def test_wrong_arguments_of_the_function(tmp_path, arguments, message):
    with pytest.raises(MoesaicError, match=message):
        moesaic.upcycle("base", tmp_path / "x", **{"method": "sparse"} | arguments)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_this_folder(refusal, name, tmp_path):
    assert refusal("upcycle", name, tmp_path / "x", "--method", "sparse").startswith("BASE: is empty")
    assert "is empty" in refusal("plan", name)
    assert "is empty" in refusal("generate", name, "hello")


def test_a_dense_model_that_cannot_be_a_base_is_said_so(call, dense, tmp_path):
    config = json.loads((dense / "base" / "config.json").read_text()) | {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((dense / "base" / "model.safetensors").read_bytes())
    notes = json.loads(call("plan", tmp_path, "--json")[1])["notes"]
    assert any("model_type gpt2 cannot be a base: its FFN has no gate" in note for note in notes)


def test_public_names():
    assert set(moesaic.__all__) <= set(dir(moesaic))
    assert all(callable(getattr(moesaic, name)) for name in moesaic.__all__ if name != "__version__")
    with pytest.raises(AttributeError, match="no attribute 'upcycel'"):
        _ = moesaic.upcycel  # pyright: ignore[reportAttributeAccessIssue]


# --- recipes ---------------------------------------------------------------------------------------------------------


def test_recipes(call):
    listed = json.loads(call("recipes", "list", "--json")[1])["recipes"]
    assert [recipe["name"] for recipe in listed] == [recipe.name for recipe in shipped_recipes()]
    lines = call("recipes", "list")[1].splitlines()
    assert len(lines) == len(listed)
    name = listed[0]["name"]
    text = call("recipes", "show", name)[1]
    assert text.startswith("# ")
    assert call("recipes", "show", name.partition("/")[2])[1] == text
    assert json.loads(call("recipes", "show", name, "--json")[1]) == {"name": name, "yaml": text}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_is_one_line(call, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)

    def killed(_):
        with output.output_folder("somewhere"):
            os.kill(os.getpid(), signal.Signals[name])

    monkeypatch.setattr(cli, "_call", killed)
    status, out, err = call("upcycle", "a", "b")
    assert (status, out, err) == (128 + signal.Signals[name], "", f"moesaic: interrupted: stopped by {name}\n")
    assert not Path("somewhere").exists()


# --- the process -----------------------------------------------------------------------------------------------------


def test_process_exit_status_and_streams():
    done = process("plan", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("moesaic: error: nowhere: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["recipes", "list"], ["upcycle", "--help"], ["--help"], ["--version"]])
def test_reader_that_goes_away_is_no_error(arguments):
    command = [sys.executable, "-m", "moesaic", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        error = running.stderr.read()
    assert (running.returncode, error) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on which every write fails")
def test_full_disk_behind_stdout_is_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "moesaic", "recipes", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = f"standard output cannot be written ({os.strerror(errno.ENOSPC)}); what was made before is complete"
    assert (done.returncode, done.stderr) == (2, f"moesaic: error: {said}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file on which every write fails")
@pytest.mark.parametrize("as_json", [False, True])
def test_a_result_that_cannot_be_printed_leaves_the_target(dense, tmp_path, as_json):
    out = tmp_path / "moe"
    command = [sys.executable, "-m", "moesaic", "upcycle", str(dense / "base"), str(out), "--method", "sparse"]
    with Path("/dev/full").open("w") as full:
        command += ["--json"] if as_json else []
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "error: standard output cannot be written" in done.stderr
    assert "moe:" not in done.stderr
    assert (out / "moesaic.json").exists()


# --- commands of other packages --------------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A package with a command of its own, on the path and with its entry point."""
    (tmp_path / "made_up_plugin.py").write_text(
        "from cyclopts import App\n"
        "from moesaic.cli.options import Json\n"
        "from moesaic.cli.output import print_result\n"
        "app = App(name='made-up', help='Do what nobody needs.')\n"
        "@app.command\n"
        "def twice(number: int, /, *, json: Json = False) -> None:\n"
        "    print_result([str(2 * number)], {'twice': 2 * number}, as_json=json)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("made_up_plugin", None)
    entry = EntryPoint(name="made-up", value="made_up_plugin:app", group="moesaic.commands")
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] if group == "moesaic.commands" else [])
    yield
    del cli.app["made-up"]


@pytest.mark.usefixtures("plugin")
def test_a_plugin_s_command_works_like_ours(call, refusal):
    assert call("made-up", "twice", "4") == (0, "8\n", "")
    assert json.loads(call("made-up", "twice", "4", "--json")[1]) == {"twice": 8}
    assert refusal("made-up", "twice", "four").startswith('Invalid value for NUMBER: unable to convert "four" into int')
    assert "Do what nobody needs." in call("--help")[1]


@pytest.mark.usefixtures("plugin")
def test_a_plugin_is_imported_only_where_it_is_used(call):
    cli.mount_plugins()
    assert call("recipes", "list")[0] == 0
    assert "made_up_plugin" not in sys.modules


@pytest.mark.parametrize("line", ["lab", "lab list", "lab run x y --jobs 2", "lab --help"])
def test_a_lab_that_is_not_installed_is_one_line(line):
    """In a process of its own: what another test has mounted stays mounted."""
    code = f"""
import sys
from moesaic.cli import app
app.entry_points, app.find_spec = lambda group: [], lambda name: None
sys.exit(app.run({line.split()!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    message = "moesaic: error: lab: is a package of its own; pip install moesaic-lab\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
