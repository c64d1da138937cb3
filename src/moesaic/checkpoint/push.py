"""`push_to_hub`, for every verb that writes a checkpoint: asked before the work, uploaded when the result is complete.

Torch-free; huggingface_hub is imported only where something is pushed.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from moesaic.checkpoint.record import CARD_FILE, OUT_IN_CARDS
from moesaic.common.errors import MoesaicError
from moesaic.common.files import explained
from moesaic.common.progress import notice, on_terminal

Result = TypeVar("Result")

_ONLY_HERE = "state/*"
"""What training goes on from: as large as several models, and of use on this machine only."""
_OLD_WEIGHTS = "*.safetensors*"
"""Files of an earlier push that the new one may not have."""
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


def pushed(run: Callable[..., Result]) -> Callable[..., Result]:
    """Give a verb that writes a checkpoint to `out` the keywords `push_to_hub` and `public`.

    Name, token and the repository's visibility are checked before the verb starts, in a dry run as well. A failed
    upload raises a `MoesaicError` that says how to push the result, which is whole, again.
    """

    @wraps(run)
    def call(
        recipe: Any, out: str | Path, *, push_to_hub: str | None = None, public: bool = False, **options: Any
    ) -> Result:
        first = os.environ.get("RANK", "0") == "0"  # of several, one pushes
        if first:
            check_push(push_to_hub, public=public)
        result = run(recipe, out, **options)
        if push_to_hub is not None and first and not options.get("dry_run"):
            push(Path(out), push_to_hub, public=public, quiet=options.get("quiet", True))
        return result

    own = inspect.signature(run)
    further = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, hint, default in (("push_to_hub", str | None, None), ("public", bool, False))
    ]
    anyhow: Any = call
    anyhow.__signature__ = own.replace(parameters=[*own.parameters.values(), *further])
    return call


def check_push(push_to_hub: str | None, *, public: bool) -> None:
    """Refuse (MoesaicError) what a push would fail on, or do otherwise than was asked.

    That is: a name that is none, a token that is missing, wrong or may not write, somebody else's account, and a
    repository that is there and is public where a private one was asked for, or the other way round.
    """
    if push_to_hub is None:
        if public:
            raise MoesaicError("--public: says how --push-to-hub uploads; give both or neither")
        return
    from huggingface_hub import HfApi, constants, errors

    said, repository = f"--push-to-hub {push_to_hub}", push_to_hub
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        raise MoesaicError(f"{said}: is not a repository's name; give ORG/NAME, such as my-name/my-model")
    if constants.is_offline_mode():
        raise MoesaicError(f"{said}: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids it; unset it")
    api = HfApi()
    with _explained(lambda why: f"{said}: {why}"):
        account = api.whoami()
        names = [account["name"], *(one["name"] for one in account.get("orgs", []))]
        if repository.partition("/")[0] not in names:
            raise MoesaicError(f"{said}: your token is not of that account; it may write to {', '.join(names)}")
        if account.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise MoesaicError(f"{said}: your token may only read; {_LOG_IN}")
        try:
            is_private = bool(api.model_info(repository).private)
        except errors.RepositoryNotFoundError:
            return
    if is_private == public:
        there, way_out = ("private", "leave out --public") if is_private else ("public", "give --public")
        raise MoesaicError(f"{said}: is there already, and {there}; {way_out}, or choose another name")


def push(out: Path, repository: str, *, public: bool, quiet: bool) -> None:
    """Upload a result; the run state of training stays here.

    Raises:
        MoesaicError: it failed, and how to do it again.
    """
    from huggingface_hub import HfApi

    visibility = "--no-private" if public else "--private"
    again = f"hf upload {shlex.join([repository, str(out), '.'])} {visibility}"
    again += f" --exclude '{_ONLY_HERE}' --delete '{_OLD_WEIGHTS}'"

    def failed(why: str) -> str:
        return f"{out}: is complete, but was not pushed to {repository} ({why}); push it again with `{again}`"

    _name_in_card(out, repository)
    api = HfApi()
    try:
        with _explained(failed), _bars(shown=on_terminal() and not quiet):
            api.create_repo(repository, private=not public, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=out,
                commit_message="Upload with Moesaic",
                ignore_patterns=_ONLY_HERE,
                delete_patterns=_OLD_WEIGHTS,
            )
    except KeyboardInterrupt:
        notice(failed("interrupted"))
        raise
    notice(f"{out}: is on the hub, {'public' if public else 'private'}: {api.endpoint}/{repository}", quiet=quiet)


def _name_in_card(out: Path, repository: str) -> None:
    """Let the card's code load the repository, where it said OUT."""
    card, new = out / CARD_FILE, out / f".{CARD_FILE}.new"
    with explained(card):
        new.write_text(card.read_text(encoding="utf-8").replace(f'"{OUT_IN_CARDS}"', f'"{repository}"'), "utf-8")
        new.replace(card)


@contextmanager
def _explained(say: Callable[[str], str]) -> Iterator[None]:
    """Errors of the hub and the network as one line: what `say` makes of the reason."""
    import httpx2
    from huggingface_hub import constants, errors

    try:
        yield
    except MoesaicError:
        raise
    except (OSError, httpx2.HTTPError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        text = " ".join(str(error).split())
        cases = [
            (isinstance(error, errors.LocalTokenNotFoundError), f"there is no token; {_LOG_IN}"),
            (status == 401, f"the hub does not know your token; {_LOG_IN}"),
            (status == 403, f"the hub forbids it ({text}); {_LOG_IN}"),
            (status is not None, f"the hub answered {status} ({text})"),
            (
                isinstance(error, httpx2.HTTPError | ConnectionError),
                f"{constants.ENDPOINT} cannot be reached; check the network (HTTPS_PROXY, HF_ENDPOINT)",
            ),
        ]
        why = next((message for applies, message in cases if applies), text)
        raise MoesaicError(say(why)) from error


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """The hub's own progress bars, or none."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not shown and not before:
            enable_progress_bars()
