"""Build the documentation as a site in build/site: python tools/website.py

The documents link each other, and programs, as files of the repository do. So they are first laid out for the
generator: docs at the root, the laboratory's under lab/, and whatever else they link to, programs as pages.
Links are rewritten to the places there. A link that leads nowhere is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from os.path import relpath
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "mkdocs.yml"
STAGE = ROOT / "build" / "docs"  # docs_dir of the configuration
BUILT = ROOT / "build" / "site"  # site_dir of the configuration
HOMES = {"docs": "", "lab/docs": "lab", "examples": "examples", "lab/examples": "lab/examples"}
_CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def place(file: Path) -> Path:
    """Where a file of the repository lies in the site's sources."""
    path = file.relative_to(ROOT)
    for home, new in HOMES.items():
        if path.is_relative_to(home):
            path = Path(new) / path.relative_to(home)
            break
    if path.name == "README.md":
        return path.with_name("index.md")
    return path.with_name(path.name + ".md") if path.suffix == ".py" else path


def laid_out(file: Path, found: list[Path]) -> str:
    """The text of a page, with its links as they are in the site; ``found`` gets the files they lead to."""

    def led(link: re.Match[str]) -> str:
        address, _, anchor = link[2].partition("#")
        if "://" in address or not address:
            return link[0]
        target = (file.parent / unquote(address)).resolve()
        if not target.is_file():
            raise SystemExit(f"{file.relative_to(ROOT)}: {link[2]} leads nowhere")
        found.append(target)
        new = relpath(place(target), place(file).parent)
        return f"{link[1]}{new}{'#' + anchor if anchor else ''}{link[3]}"

    text = file.read_text("utf-8")
    if file.suffix == ".py":
        return f"# {file.name}\n\n```python\n{text}```\n"
    parts = _CODE.split(text)
    return "".join(part if number % 2 else _LINK.sub(led, part) for number, part in enumerate(parts))


def lay_out(stage: Path) -> None:
    """Write the sources of the site: the index, and all that it leads to."""
    waiting = [ROOT / "docs" / "index.md"]
    for file in waiting:  # grows
        new = stage / place(file)
        new.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix in (".md", ".py"):
            found: list[Path] = []
            new.write_text(laid_out(file, found), "utf-8")
            waiting += [target for target in dict.fromkeys(found) if target not in waiting]
        else:
            shutil.copy(file, new)


class _Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links = set[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        self.links.add(given.get("href") or given.get("src") or "")


def broken(site: Path) -> list[str]:
    """The links in a built site that lead to no file or no heading of it."""
    pages = {page: _Page(page.read_text("utf-8")) for page in site.rglob("*.html")}
    wrong = []
    for page, own in pages.items():
        for link in own.links:
            address, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:|//", address) or page.name == "404.html":
                continue
            target = (page.parent / unquote(address)).resolve() if address else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                anchor and target in pages and unquote(anchor) not in pages[target].anchors
            ):
                wrong.append(f"{page.relative_to(site)}: {link}")
    return sorted(wrong)


def main() -> None:
    shutil.rmtree(STAGE, ignore_errors=True)
    lay_out(STAGE)
    subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", CONFIG], check=True
    )
    if wrong := broken(BUILT):
        raise SystemExit("links that lead nowhere:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
