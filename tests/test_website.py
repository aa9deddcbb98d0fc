"""The site of the documents: what is laid out for its generator, and that no link in it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import website
import yaml


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    website.lay_out(folder)
    return folder


def listed(entry: object) -> set[str]:
    """The pages in a part of the navigation."""
    if isinstance(entry, str):
        return {entry}
    inner = entry.values() if isinstance(entry, dict) else entry
    return {page for own in inner for page in listed(own)}  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation(stage: Path) -> None:
    config = yaml.safe_load(website.CONFIG.read_text("utf-8"))
    assert website.ROOT / config["docs_dir"] == website.STAGE
    assert website.ROOT / config["site_dir"] == website.BUILT
    pages = {
        str(website.place(page))
        for folder in ("docs", "lab/docs")
        for page in (website.ROOT / folder).rglob("*.md")
    }
    assert listed(config["nav"]) == {*pages, "integrations/index.md"}
    assert all((stage / page).is_file() for page in pages)


def test_programs_and_pages_beside_the_docs_are_pages(stage: Path) -> None:
    assert "# rewrite.py\n\n```python\n" in (stage / "examples" / "rewrite.py.md").read_text("utf-8")
    assert "](../examples/rewrite.py.md)" in (stage / "guides" / "generate.md").read_text("utf-8")
    assert "](../lab/index.md)" in (stage / "concepts" / "architecture.md").read_text("utf-8")
    assert "](../decisions/index.md)" not in (stage / "index.md").read_text("utf-8")
    assert (stage / "grafana.json").is_file()


def test_broken_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<h1 id="top"><a href="sub/b.html#there"></a><a href="#top"></a>', "utf-8"
    )
    (tmp_path / "sub" / "b.html").write_text(
        '<p id="here"><a href="../c.html"></a><img src="x.png">', "utf-8"
    )
    assert website.broken(tmp_path) == [
        "a.html: sub/b.html#there",
        "sub/b.html: ../c.html",
        "sub/b.html: x.png",
    ]


def test_a_link_that_leads_nowhere_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(website, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("`[a](b.md)` [c](https://d.e) [f](#g) [h](none.md)", "utf-8")
    with pytest.raises(SystemExit, match=r"page.md: none.md leads nowhere"):
        website.laid_out(page, [])
