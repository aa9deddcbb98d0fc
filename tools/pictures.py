"""Renew the pictures of the playground in docs/images, from a server that is running.

    outpace serve --model smollm2 --no-adaptive &
    python tools/pictures.py http://127.0.0.1:8000

It needs playwright and a chromium on the path. The pictures have 64 colours, which are enough for the page.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from PIL import Image
from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).parent.parent / "docs" / "images"
COLOURS = 64
QUESTION = "Write a Python class Matrix with methods add, subtract, multiply and transpose."


def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    file = IMAGES / f"playground-{name}.png"
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file}: {file.stat().st_size // 1024} KiB")


def opened(browser: Browser, address: str, width: int, height: int, scheme: Literal["dark", "light"]) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.goto(address)
    page.get_by_role("button", name="Generate", disabled=False).wait_for()
    return page


def ended(page: Page) -> None:
    page.get_by_text(re.compile("(done|cut at the limit): ")).wait_for(timeout=300_000)


def main(address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])

        page = opened(browser, address, 1280, 1020, "light")
        page.get_by_label("Message").fill(QUESTION)
        page.get_by_role("button", name="Generate").click()
        ended(page)
        save(page, "light")

        page = opened(browser, address, 1280, 860, "dark")
        page.get_by_role("tab", name="Race").click()
        page.get_by_label("Message").fill(QUESTION)
        page.get_by_role("radio", name="one after the other").check()
        page.get_by_role("button", name="Race").click()
        page.locator("#verdict.good").wait_for(timeout=300_000)
        save(page, "dark")

        page = opened(browser, address, 320, 640, "light")
        page.get_by_role("tab", name="Edit").click()
        page.get_by_role("button", name="Edit").click()
        ended(page)
        save(page, "phone")


if __name__ == "__main__":
    main(sys.argv[1])
