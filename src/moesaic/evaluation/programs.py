"""Generated programs, run in a process of their own without network: HumanEval and MBPP. Linux only.

What holds for a program: a new network namespace (no interface but a loopback that is down), a new process namespace
(whatever it starts dies with it), limits on time, memory, open files and file size, an empty environment and an empty
working folder. What does not: it can read and write the files that the user can.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.common.errors import MoesaicError

_ISOLATION_FAILED = 97  # exit status of the launcher

# Run with `python -I -S`: source file, file for the proof, proof, seconds, bytes. A new user namespace owns the others,
# so that the program cannot go back to the old ones even where the user is root. The proof is written only where the
# program reached its end, so one that exits early has not passed.
_LAUNCHER = f"""
import ctypes, os, resource, signal, sys
source, result, proof, seconds, memory = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
if libc.unshare(NEW_USER | NEW_PID | NEW_NET):
    os.write(2, os.strerror(ctypes.get_errno()).encode())
    os._exit({_ISOLATION_FAILED})
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(0 if status == 0 else 1)
os.dup2(0, 2)  # /dev/null: nobody reads what the program says
libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # dies with the launcher
libc.prctl(38, 1, 0, 0, 0)  # no new privileges
for kind, limit in (
    (resource.RLIMIT_AS, int(memory)),
    (resource.RLIMIT_CPU, int(float(seconds)) + 1),
    (resource.RLIMIT_FSIZE, 1 << 24),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (limit, limit))
with open(source, encoding="utf-8") as file:
    text = file.read()
sys.argv = [source]
try:
    exec(compile(text, source, "exec"), {{"__name__": "__main__"}})
    with open(result, "w") as file:
        file.write(proof)
except BaseException:
    os._exit(1)
os._exit(0)
"""


@dataclass(frozen=True, kw_only=True)
class ProgramLimits:
    """What a program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1 << 30


def passes(program: str, limits: ProgramLimits | None = None) -> bool:
    """Whether a program runs to its end without an error, within the limits and without network.

    Raises:
        MoesaicError: this machine cannot isolate it; nothing was run then.
    """
    limits = limits or ProgramLimits()
    proof = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="moesaic-program-") as folder:
        source, result, work = Path(folder, "program.py"), Path(folder, "result"), Path(folder, "work")
        try:
            source.write_text(program, encoding="utf-8")
        except UnicodeEncodeError:  # lone surrogates: no Python program
            return False
        work.mkdir()
        arguments = [str(source), str(result), proof, str(limits.seconds), str(limits.memory_bytes)]
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, *arguments],
            cwd=work,
            env={"PATH": os.defpath, "HOME": str(work), "LANG": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            status = _wait(process, limits.seconds)
            if status == _ISOLATION_FAILED:
                assert process.stderr is not None
                raise _not_isolated(process.stderr.read().decode(errors="replace"))
        return status == 0 and result.is_file() and result.read_text() == proof


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status, or None where the time was up; the launcher's death ends the namespace and all in it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()


def check_isolation() -> None:
    """Prove that a program gets no network, by one that tries to reach a port of this process.

    Raises:
        MoesaicError: it cannot be guaranteed here.
    """
    if not sys.platform.startswith("linux"):
        raise _not_isolated(f"{sys.platform} has no network namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        if not passes("import socket\nassert [name for _, name in socket.if_nameindex()] in (['lo'], [])"):
            raise _not_isolated("a program sees the network's interfaces, or cannot be run at all")
        if passes(reach):
            raise _not_isolated("a program reached this process over the network")


def _not_isolated(reason: str) -> MoesaicError:
    return MoesaicError(
        f"--allow-code-execution: generated programs cannot be kept from the network here ({reason.strip()}); allow "
        "unprivileged user namespaces (kernel.unprivileged_userns_clone, a container's seccomp profile), or leave out "
        "humaneval and mbpp"
    )


def humaneval_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results` of HumanEval: the problem's own test decides."""
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(program))}


def mbpp_results(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """lm-eval's `process_results` of MBPP: all tests of the problem must pass."""
    program = "\n".join([doc.get("test_setup_code") or "", _without_fence(results[0]), *doc["test_list"]])
    return {"pass@1": float(passes(program))}


def _without_fence(text: str) -> str:
    """The program, without Markdown's ``` lines around it where a model writes them."""
    if "```" not in text:
        return text
    _, _, rest = text.partition("```")
    first, _, body = rest.partition("\n")
    return (body if first.strip().lower() in ("", "python", "py") else rest).partition("```")[0]
