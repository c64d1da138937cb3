"""Where there is a Chromium for the browser tests: Playwright's own, or the system's.

As a script: prints its path, or leaves with status 1 when there is none (`make browser` then installs one).
"""

import shutil
import sys
from pathlib import Path

SYSTEM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Path of a browser that Playwright can drive; None if there is none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    if Path(own).exists():
        return own
    return next(filter(None, map(shutil.which, SYSTEM)), None)


if __name__ == "__main__":
    found = find_chromium()
    print(found or "no Chromium")
    sys.exit(0 if found else 1)
