"""A headless Chromium, and pages that notice everything they must not do."""

import pytest

from tests.browser.chromium import find_chromium


@pytest.fixture(scope="session")
def chromium():
    """One browser for all tests; they are skipped where there is none."""
    from playwright.sync_api import sync_playwright

    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: `make browser` installs one where it can")
    with sync_playwright() as playwright:
        # Containers and CI run as root, for whom Chromium's sandbox doesn't start, and have no graphics card.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """A report that is open in a browser, with what it said and asked for."""

    def __init__(self, page):
        self.page = page
        self.said: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, file, view=""):
        """Open the report and wait for its first view."""
        self.page.goto(f"{file.as_uri()}{view and '#' + view}")
        self.page.wait_for_selector("html[data-ready]", state="attached")
        return self

    def view(self, name):
        """Open a view with a click and wait for its charts and texts."""
        self.page.click(f"#tab-{name}")
        self.settle()

    def settle(self):
        """Wait until every chart of the view is drawn and every pane filled."""
        self.page.wait_for_function(
            """() => [...document.querySelectorAll('#main .plot')].every((one) => one.classList.contains('drawn'))
              && [...document.querySelectorAll('.cluster-detail, .expert, .reader')].every((e) => e.firstElementChild)
            """,
            polling=50,
        )

    def wait_for(self, condition):
        """Wait until a condition, in JavaScript, holds, however long a busy machine takes."""
        self.page.wait_for_function(condition, polling=50)

    def texts(self, selector):
        return self.page.eval_on_selector_all(selector, "all => all.map((one) => one.textContent)")


@pytest.fixture
def visit(chromium):
    """Make a visit; several may be made in one test."""
    contexts = []

    def make(**settings):
        context = chromium.new_context(viewport={"width": 1300, "height": 900}, **settings)
        context.set_default_timeout(120_000)
        contexts.append(context)
        return Visit(context.new_page())

    yield make
    for context in contexts:
        context.close()
