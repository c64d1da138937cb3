"""Edited documents: a command works, or says in one line why not, and leaves nothing. The long form is `make fuzz`."""

import contextlib
import io

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from moesaic.cli import app as cli
from tests.fuzz.documents import DOCUMENTS, Document, make_workspace, outcome, quiet_cache
from tests.fuzz.edits import WEIRD, edits

EXAMPLES = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with quiet_cache(folder / "cache"):
        yield make_workspace(folder / "work")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_an_edited_document_is_read_or_refused_in_one_line(workspace, document: Document):
    @seeded(0)
    @settings(
        max_examples=EXAMPLES if document.quick else 2,
        derandomize=False,  # the seed is given
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    @given(edits)
    def look(edit):
        found = outcome(document, workspace, edit)
        assert found in ("works", "refused"), f"{edit} {ascii(WEIRD[edit[2]])[:60]}: {found}"

    look()


@pytest.mark.parametrize("document", [one for one in DOCUMENTS if one.quick], ids=lambda document: document.name)
def test_documents_as_they_are_work(workspace, document: Document):
    with contextlib.chdir(workspace), contextlib.redirect_stderr(io.StringIO()):
        assert cli.run(document.command.split()) == 0
    for path in workspace.glob("OUT*"):
        path.unlink()
