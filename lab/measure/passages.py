"""Passages of text from files at hand, one a line, for benchmarks that need many of them.

    python lab/measure/passages.py FOLDER ... --out passages.txt

A passage is what lies between two empty lines of a file: a paragraph, a docstring's part, some lines of code.
The longest are cut, short and repeated ones left out, and the rest is put in a random order, the same in each
run over the same files.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

KINDS = {".c", ".h", ".hpp", ".md", ".pl", ".py", ".pyi", ".rst", ".tex", ".txt"}
LEAST, MOST = 9, 64  # words


def passages(folders: Sequence[Path]) -> Iterator[str]:
    """The passages of all files below the folders, in the order of their paths."""
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in KINDS and file.is_file() and not file.is_symlink():
                yield from passages_of(file.read_text("utf-8", errors="ignore"))


def passages_of(text: str) -> Iterator[str]:
    """The passages of a text, without the marks of comments and docstrings, their white space single."""
    for part in re.split(r"\n\s*\n", text):
        words = re.sub(r'^\s*#+ |"""', " ", part, flags=re.MULTILINE).split()
        if len(words) >= LEAST and sum(map(len, words)) < 12 * len(words):
            yield " ".join(words[:MOST])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of sources and documents")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=250_000, help="passages to write")
    given = parser.parse_args()
    found = list(dict.fromkeys(passages(given.folders)))
    random.Random(0).shuffle(found)
    given.out.write_text("\n".join(found[: given.most]) + "\n", "utf-8")
    print(f"{min(len(found), given.most)} of {len(found)} passages")


if __name__ == "__main__":
    main()
