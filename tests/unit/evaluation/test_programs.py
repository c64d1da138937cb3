import fcntl
import json
import socket
import sys
from pathlib import Path

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.evaluation import programs
from moesaic.evaluation.programs import ProgramLimits, check_isolation, humaneval_results, mbpp_results, passes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")

FAST = ProgramLimits(seconds=2.0, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("x = 1\nassert x == 1", True),
        ("assert False", False),
        ("this is no Python", False),
        ("import sys\nsys.exit(0)\nassert False", False),
        ("import os\nos._exit(0)", False),
        ("if __name__ == '__main__':\n    pass\nelse:\n    raise ValueError", True),
        ("x = '\ud800'", False),
        ("from __future__ import annotations\nprint('x' * 100000)", True),
        ("import os\nassert set(os.environ) <= {'PATH', 'HOME', 'LANG', 'LC_CTYPE'}", True),
    ],
)
def test_what_passes(program: str, right: bool):
    assert passes(program, ProgramLimits()) is right


def test_time_is_limited_also_for_what_sleeps():
    """It would pass, if it were waited for."""
    assert not passes("import time\ntime.sleep(60)", ProgramLimits(seconds=0.7))


def test_memory_is_limited():
    assert not passes("x = bytearray(1 << 30)", FAST)
    assert passes("x = bytearray(1 << 20)", ProgramLimits())


def test_a_process_that_the_program_leaves_behind_dies_with_it(tmp_path: Path):
    """It holds a lock for as long as it lives; if it lived on, the test would not end."""
    file = tmp_path / "lock"
    program = (
        "import fcntl, os, signal\n"
        "read, write = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    lock = open({str(file)!r}, 'w')\n"
        "    fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "    os.write(write, b'held')\n"
        "    signal.pause()\n"
        "assert os.read(read, 4) == b'held'\n"
    )
    assert passes(program, ProgramLimits())
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)


def test_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
        assert not passes(reach, ProgramLimits())
        socket.create_connection(("127.0.0.1", port), 2).close()  # and from here it is reached
    check_isolation()


def test_refused_where_it_cannot_be_guaranteed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "_LAUNCHER", programs._LAUNCHER.replace("| NEW_NET", "| NEW_NET | -1"))
    with pytest.raises(MoesaicError, match=r"cannot be kept from the network here \(Invalid argument\)"):
        check_isolation()


def test_refused_where_the_launcher_shares_the_network(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(programs, "_LAUNCHER", programs._LAUNCHER.replace(" | NEW_NET", ""))
    with pytest.raises(MoesaicError, match="cannot be kept from the network here"):
        check_isolation()


HUMANEVAL = {
    "prompt": "def double(x):\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}
MBPP = {"test_setup_code": "", "test_list": ["assert double(2) == 4", "assert double(-1) == -2"]}


def test_humaneval_runs_its_own_test():
    assert humaneval_results(HUMANEVAL, ["    return 2 * x\n"]) == {"pass@1": 1.0}
    assert humaneval_results(HUMANEVAL, ["    return x\n"]) == {"pass@1": 0.0}


@pytest.mark.parametrize(
    "answer",
    [
        "def double(x):\n    return 2 * x",
        "```python\ndef double(x):\n    return 2 * x\n```",
        "```\ndouble = lambda x: x + x\n```",
    ],
)
def test_mbpp_runs_its_tests(answer: str):
    assert mbpp_results(MBPP, [answer]) == {"pass@1": 1.0}
    assert mbpp_results(MBPP, [answer.replace("double", "other")]) == {"pass@1": 0.0}


def test_reference_solutions_of_the_shipped_problems_pass():
    evals = Path(__file__).parents[4] / "shared" / "data" / "evals"
    if not evals.is_dir():
        pytest.skip("needs shared/data")
    problems = [json.loads(line) for line in (evals / "humaneval.test.jsonl").read_text().splitlines()[:5]]
    assert all(humaneval_results(row, [row["canonical_solution"]])["pass@1"] for row in problems)
    problems = [json.loads(line) for line in (evals / "mbpp.test.jsonl").read_text().splitlines()[:5]]
    assert all(mbpp_results(row, [row["code"]])["pass@1"] for row in problems)
