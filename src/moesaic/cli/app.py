"""The application: its verbs, and what becomes of errors."""

import os
import signal
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError, UnknownOptionError, UnusedCliTokensError

from moesaic import __version__
from moesaic.cli.listings import FAMILIES_HELP, families, recipes
from moesaic.cli.output import discard_stdout, flush, print_error
from moesaic.cli.verbs import COMMANDS
from moesaic.common.errors import MoesaicError

USER_ERROR = 2  # also what shells use for a wrong command line
BUG = 1
INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE

app = App(
    name="moesaic",
    help="Build, grow and take apart Mixture-of-Experts language models.",
    help_epilogue="`moesaic VERB --help` explains a verb. MOESAIC_TRACEBACK=1 adds tracebacks to errors.",
    help_format="plaintext",
    version=__version__,
    default_parameter=Parameter(negative=()),
    suppress_keyboard_interrupt=False,
)
for _name, _command in COMMANDS.items():
    app.command(
        f"moesaic.cli.verbs:{_name}",
        name=_name,
        help=_command.help,
        usage=_command.usages(_name),
        help_epilogue=f"Examples:{_command.examples}",
    )
app.command(families, name="families", **FAMILIES_HELP)
app.command(recipes)


def mount_plugins() -> None:
    """Add the commands of other packages, from their entry points `moesaic.commands`: apps, imported when called."""
    places = {entry.name: entry.value for entry in entry_points(group="moesaic.commands")}
    if find_spec("moesaic_lab") is not None:  # a checkout on the path, not installed
        places.setdefault("lab", "moesaic_lab.cli:app")
    for name, place in places.items():
        if name not in app:
            app.command(place, name=name)
    if "lab" not in app:
        app.command(_no_lab, name="lab", show=False, help_flags=())


def _no_lab(*_words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    raise MoesaicError("lab: is a package of its own; pip install moesaic-lab")


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit status: 0, 1 (check failed, or a bug), 2 (user error), 130, 141."""
    as_json = "--json" in arguments
    if not arguments or arguments[0] not in app:
        mount_plugins()
    try:
        status = _call(arguments)
        flush()
    except BrokenPipeError:
        discard_stdout()
        return PIPE_CLOSED
    except SystemExit as leaving:
        return _left(leaving, as_json=as_json)
    except KeyboardInterrupt:
        print_error("stopped by the user", kind="interrupted", as_json=as_json)
        return INTERRUPTED
    except Exception as error:
        return _report(error, as_json=as_json)
    return status


def _call(arguments: Sequence[str]) -> int:
    result: Any = app(arguments, exit_on_error=False, print_error=False, verbose=False, result_action="return_value")
    return result if isinstance(result, int) else 0


def _left(leaving: SystemExit, *, as_json: bool) -> int:
    """The exit status of a SystemExit: of a closed pipe (rich prints help) or of a signal (`output_folder`)."""
    if isinstance(leaving.__context__, BrokenPipeError):
        return PIPE_CLOSED
    status = leaving.code if isinstance(leaving.code, int) else BUG
    names = {128 + number: number.name for number in signal.Signals}
    if status in names:
        print_error(f"stopped by {names[status]}", kind="interrupted", as_json=as_json)
    return status


def _report(error: Exception, *, as_json: bool) -> int:
    """Print an error as one line and return the exit status."""
    if os.environ.get("MOESAIC_TRACEBACK") == "1":
        traceback.print_exception(error)
    if isinstance(error, UnusedCliTokensError):
        print_error(f"unexpected argument: {' '.join(error.unused_tokens or ())}", as_json=as_json)
        return USER_ERROR
    if isinstance(error, UnknownOptionError):
        print_error(_unknown_option(error), as_json=as_json)
        return USER_ERROR
    if isinstance(error, (MoesaicError, CycloptsError)):
        print_error(str(error), as_json=as_json)
        return error.status if isinstance(error, MoesaicError) else USER_ERROR
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        print_error(f"{place}{error.strerror or error}", as_json=as_json)
        return USER_ERROR
    if isinstance(error, MemoryError):
        print_error("not enough memory", as_json=as_json)
        return USER_ERROR
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    print_error(f"{message}; this is a bug: MOESAIC_TRACEBACK=1 shows where", kind="internal error", as_json=as_json)
    return BUG


def _unknown_option(error: UnknownOptionError) -> str:
    """The error with a way out: the nearest option of the verb, or where all of them are listed."""
    text = str(error)
    if "Did you mean" in text:
        return text
    verb = " ".join(["moesaic", *(error.command_chain or ())])
    return f"{text} `{verb} --help` lists all."
