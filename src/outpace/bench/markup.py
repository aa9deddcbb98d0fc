"""HTML that the reports are made of: a page, a plot with its data beside it, a table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from html import escape

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto;
       max-width: 75rem; padding: 0 1rem; }
h1 { font-size: 1.6rem } h2 { font-size: 1.3rem; border-bottom: 1px solid #ccc; margin-top: 2.5rem }
ul { padding-left: 1.2rem; overflow-wrap: anywhere }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; margin-top: 1rem }
caption { text-align: left; color: #555; padding-bottom: .3rem }
th, td { padding: .2rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
thead th { white-space: normal; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
.plot { display: flex; flex-wrap: wrap; gap: 0 2rem; align-items: flex-start; margin: 1.5rem 0 }
.plot figure { flex: 1 1 30rem; min-width: 0; max-width: 42rem; margin: 0 }
.plot .scroll { min-width: 0; max-width: 100% }
.plot img { width: 100%; min-width: 26rem; height: auto }
.wide figure { flex-basis: 100%; max-width: 62rem } .wide img { min-width: 44rem }
.scroll { overflow-x: auto } figcaption { color: #333 } .failed { color: #a40000 }
"""


def frame(title: str, body: str) -> str:
    """A whole page around its body."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def plot(source: str, alt: str, caption: str, data: str, wide: bool = False) -> str:
    """A plot that says in words what it shows, with a table of its data beside it, or below a wide one."""
    kind = "plot wide" if wide else "plot"
    image = f'<img src="{source}" alt="{escape(alt)}">'
    return (
        f'<div class="{kind}">\n<figure><div class="scroll">{image}</div>\n'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n{data}\n</div>"
    )


def table(caption: str, head: Seq[str], body: Seq[Seq[str]]) -> str:
    """A table whose first column names its rows."""
    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in body
    )
    return (
        f'<div class="scroll"><table>\n<caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{titles}</tr></thead>\n"
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )
