"""Record a race of transformers' generate(), plain decoding and a drafter, and draw it as an animated SVG.

    python tools/race.py docs/images/race.svg

Each lane decodes the same prompt several times, in turns with the others; of its runs the fastest is drawn.
A token appears in the picture as long after the start as in that run, in seconds of the processor, since
other programs may use the machine: run it with one thread (OMP_NUM_THREADS=1). A drafted token is green.
"""

from __future__ import annotations

import argparse
import html
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import outpace
from outpace.bench.methods import split_drafters
from outpace.bench.ours import Ours
from outpace.bench.runs import Method, PromptBatch
from outpace.bench.stock import StockMethod
from outpace.loading import Loaded
from outpace.text import TextStream

Piece = tuple[float, str, bool]  # seconds since the start, text, drafted

PROMPT = "Write a Python class Matrix with methods add, subtract, multiply and transpose."
COLUMNS, ROWS = 44, 21  # of the text of a lane
CHARACTER, LINE, PAD, TOP, FOOT = 6.0, 14, 10, 30, 26  # sizes in pixels, for a font of 10
HOLD = 3.0  # seconds that the end is shown
STYLE = """
text{font:10px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
text{fill:#d6deeb;white-space:pre}
.h{font-weight:700}.f{fill:#8fa3b8}.d{fill:#7ee2a8;font-weight:700}
@media (prefers-reduced-motion:reduce){g{animation:none!important}}
"""


def race(loaded: Loaded, method: Method, prompt: list[int], new: int) -> list[Piece]:
    """Decode a prompt, and return its tokens with their times."""
    request = PromptBatch([prompt], [[]], new, ends=True, temperature=0.0, seeds=[0])
    method.begin()  # forgets the outputs of earlier runs
    run = method.run(request)
    stream, pieces = TextStream(loaded.tokenizer), list[Piece]()
    steps = groupby(zip(run.token_seconds[0], run.outputs[0], strict=True), key=lambda token: token[0])
    for seconds, together in steps:
        tokens = [token for _, token in together]
        for number, token in enumerate(tokens, start=1):
            stream.push(token)
            pieces.append((seconds, stream.release(), number < len(tokens)))
    return pieces


def placed(pieces: list[Piece]) -> Iterator[tuple[float, int, int, str, bool]]:
    """Yield seconds, column, row, text and kind of each run of text that appears at once."""
    column = row = 0
    for seconds, text, drafted in pieces:
        for number, line in enumerate(text.split("\n")):
            if number:
                column, row = 0, row + 1
            while line:
                if column >= COLUMNS:
                    column, row = 0, row + 1
                fits, line = line[: COLUMNS - column], line[COLUMNS - column :]
                if fits.strip():
                    yield seconds, column, row, fits, drafted
                column += len(fits)


def drawn(lanes: dict[str, list[Piece]]) -> str:
    """The picture."""
    whole = max(pieces[-1][0] for pieces in lanes.values()) + HOLD
    width = COLUMNS * CHARACTER + 2 * PAD
    height = TOP + ROWS * LINE + FOOT
    times: dict[str, None] = {}
    parts: list[str] = []

    def appears(seconds: float, content: str) -> str:
        percent = f"{100 * seconds / whole:.1f}"
        times[percent] = None
        return f'<g class="k{percent.replace(".", "_")}">{content}</g>'

    for number, (name, pieces) in enumerate(lanes.items()):
        left = number * (width + PAD)
        parts.append(f'<rect x="{left:g}" width="{width:g}" height="{height}" rx="8" fill="#0b1726"/>')
        left += PAD
        parts.append(f'<text class="h" x="{left:g}" y="20">{html.escape(name)}</text>')
        together: dict[float, list[str]] = {}
        for seconds, column, row, text, drafted in placed(pieces):
            if row < ROWS:
                x, y = left + column * CHARACTER, TOP + (row + 1) * LINE - 4
                kind = ' class="d"' if drafted else ""
                size = f' textLength="{len(text) * CHARACTER:g}"'
                together.setdefault(seconds, []).append(
                    f'<text{kind} x="{x:g}" y="{y}"{size}>{html.escape(text)}</text>'
                )
        parts += [appears(seconds, "".join(texts)) for seconds, texts in together.items()]
        end, tokens = pieces[-1][0], len(pieces)
        foot = f"{tokens} tokens in {end:.1f} s: {tokens / end:.0f} tokens/s"
        parts.append(
            appears(end, f'<text class="f" x="{left:g}" y="{height - 10}">{html.escape(foot)}</text>')
        )
    rules = [
        f".k{percent.replace('.', '_')}{{animation:k{percent.replace('.', '_')} {whole:.2f}s 3}}"
        f"@keyframes k{percent.replace('.', '_')}{{0%,{percent}%{{visibility:hidden}}}}"
        for percent in times
    ]
    size = f"{len(lanes) * (width + PAD) - PAD:g} {height}"
    title = "A race: " + ", ".join(f"{name} {pieces[-1][0]:.1f} s" for name, pieces in lanes.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">'
        f"<title>{html.escape(title)}</title><style>{STYLE}{''.join(rules)}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--drafters", default="suffix", help="separated by commas")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3, help="of which the first also measures costs")
    given = parser.parse_args()
    time.perf_counter = time.process_time
    loaded = outpace.load(given.model, dtype=given.dtype)
    prompt = loaded.encode(given.prompt, chat=True)
    methods: dict[str, Method] = {"transformers' generate()": StockMethod(loaded.target.model, "plain")}
    for spec in ("none", *split_drafters(given.drafters)):
        methods[f"outpace: {spec.partition(':')[0]}".replace("none", "plain")] = Ours(loaded.target, spec)
    lanes: dict[str, list[Piece]] = {}
    for _ in range(given.runs):
        for name, method in methods.items():
            pieces = race(loaded, method, prompt, given.max_new_tokens)
            if name not in lanes or pieces[-1][0] < lanes[name][-1][0]:
                lanes[name] = pieces
    texts = {"".join(text for _, text, _ in pieces) for pieces in lanes.values()}
    print("equal texts" if len(texts) == 1 else "the texts differ")
    for name, pieces in lanes.items():
        print(f"{name}: {len(pieces)} tokens in {pieces[-1][0]:.2f} s")
    given.out.write_text(drawn(lanes), "utf-8")
    print(given.out, given.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
