"""Write the table of docs/concepts/exactness.md from runs; `make exactness` runs this.

Each model decodes prompts plainly and with drafts, alone and together, greedily and sampled, and the tokens
are compared; plain decoding is also compared with transformers' own generate(). Two outputs are compared up
to their first difference, so that one flip counts once.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import outpace
from outpace.bench.suites import load_suite
from outpace.core import Promise, SamplingParams
from outpace.embedded import smollm2_path
from outpace.engine.engine import Engine
from outpace.loading import Loaded, load
from outpace.targets import Target, TargetModel
from outpace.targets.hardware import processor
from outpace.testing.gguf import write_gguf

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "exactness.md"
BEGIN, END = "<!-- written by make exactness -->", "<!-- end -->"
NANO, SMOLLM2 = "embedded model", "SmolLM2-135M-Instruct"
DRAFTERS = ("suffix", "lookahead")
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
Q4_K_M = 15  # llama.cpp's number of the file type
NOT_MEASURED = "not measured"
HEAD = (
    "| model | weights | options | device | beside plain decoding here | tokens compared, differing "
    "| plain decoding beside stock `generate()` | tokens compared, differing |\n"
    "| --- | --- | --- | --- | --- | ---: | --- | ---: |"
)


@dataclass(frozen=True)
class Case:
    """A model as it is run.

    Attributes:
        weights: a dtype, or the type of a GGUF file.
        options: of the target.
    """

    model: str
    weights: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """The first cells of its row."""
        shown = ", ".join(f"`{name}={value!r}`" for name, value in self.options.items())
        return self.model, self.weights, shown

    @property
    def gguf(self) -> bool:
        return self.weights not in ("float64", "float32", "float16", "bfloat16")


CASES = [
    Case(NANO, "float64"),
    Case(NANO, "float32"),
    Case(NANO, "float32", {"plan": "packed"}),
    Case(NANO, "bfloat16"),
    Case(NANO, "bfloat16", {"plan": "packed"}),
    Case(NANO, "bfloat16", {"stock": True}),
    Case(NANO, "float16"),
    Case(NANO, "bfloat16", {"quantise": "int8"}),
    Case(NANO, "bfloat16", {"quantise": "int4"}),
    Case(NANO, "GGUF q8_0"),
    Case(SMOLLM2, "float32"),
    Case(SMOLLM2, "bfloat16"),
    Case(SMOLLM2, "bfloat16", {"stock": True}),
    Case(SMOLLM2, "bfloat16", {"quantise": "int8"}),
    Case(SMOLLM2, "bfloat16", {"quantise": "int4"}),
    Case(SMOLLM2, "GGUF Q4_K_M"),
]
# Model, weights, options, device, and the two promises; of these there are no counts.
UNMEASURED: list[tuple[str, str, str, str, Promise, Promise]] = [
    ("any", "float32", "", "GPU", "same tokens but for near-ties", "same tokens but for near-ties"),
    ("any", "bfloat16, float16", "", "GPU", "not exact", "not exact"),
    ("any", "float32", "`exact=True`", "GPU", "same bits", "same tokens but for near-ties"),
    ("any", "bfloat16, float16", "`exact=True`", "GPU", "same bits", "not exact"),
]


@dataclass
class Count:
    """Tokens compared up to and including the first difference of each output, and the number of those."""

    compared: int = 0
    differing: int = 0

    def add(self, expected: Seq[int], found: Seq[int]) -> None:
        """Compare two outputs."""
        pairs = zip(expected, found, strict=False)
        same = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
        differs = same < max(len(expected), len(found))
        self.compared += same + differs
        self.differing += differs

    def __str__(self) -> str:
        return f"{self.compared:,}, {self.differing}"


@dataclass(frozen=True)
class Found:
    """The promises of a model, and how they were kept.

    Attributes:
        stock: None where there is no stock generate() of these weights.
    """

    promise: Promise
    here: Count
    stock: tuple[Promise, Count] | None

    def broken(self) -> list[str]:
        """Promises that did not hold."""
        both = [("plain decoding", self.promise, self.here)]
        if self.stock is not None:
            both.append(("generate()", *self.stock))
        kept = [(what, count) for what, promise, count in both if promise in ("same bits", "same tokens")]
        return [f"{count} tokens beside {what}" for what, count in kept if count.differing]


# -- models ----------------------------------------------------------------------------------------------


@contextmanager
def loaded(case: Case) -> Iterator[tuple[Loaded, TargetModel]]:
    """Load a case's model, and make its target."""
    name = None if case.model == NANO else "smollm2"
    if not case.gguf:
        model = load(name, case.weights, "cpu")
        yield model, Target(model.target.model, **case.options) if case.options else model.target
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        kind = case.weights.removeprefix("GGUF ")
        model = load(name, "float32", "cpu")
        write_gguf(model.target.model, file, "float32" if kind == "Q4_K_M" else kind, model.tokenizer)
        yield model, Target(quantised(file) if kind == "Q4_K_M" else file)


def quantised(file: Path) -> Path:
    """Quantise a GGUF file to Q4_K_M, by llama.cpp itself."""
    import llama_cpp

    out = file.with_name("q4_k_m.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = Q4_K_M
    if code := llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), params):
        raise SystemExit(f"llama_model_quantize ended with {code}")
    return out


def prompts_of(model: Loaded, count: int) -> list[list[int]]:
    """Token ids of the first turns of prompts that come with outpace, of all categories."""
    items = load_suite("builtin").items
    chosen = items[:: len(items) // count][:count]
    return [model.encode(str(item.turns[0]), chat=model.has_template) for item in chosen]


# -- comparisons -----------------------------------------------------------------------------------------


def decoded(
    target: TargetModel, drafter: str, prompts: Seq[list[int]], params: SamplingParams, together: bool
) -> list[list[int]]:
    """Outputs of prompts decoded one after the other by an engine, or all together."""
    engine = Engine(target, drafter, adaptive=False, slots=len(prompts) if together else 1)
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    return [list(one.tokens) for group in groups for one in engine.generate(group, params)]


def measured(case: Case, count: int, tokens: int) -> Found:
    """Decode a case's prompts in all ways, and compare."""
    with loaded(case) as (model, target):
        prompts = prompts_of(model, count)
        here = Count()
        for params in (GREEDY, SAMPLED):
            own = SamplingParams(**{**vars(params), "max_new_tokens": tokens})
            plain = decoded(target, "none", prompts, own, False)
            ways = [(drafter, False) for drafter in DRAFTERS] + [(DRAFTERS[0], True)]
            for drafter, together in ways:
                for pair in zip(plain, decoded(target, drafter, prompts, own, together), strict=True):
                    here.add(*pair)
            if params is GREEDY:
                greedy = plain
        stock = None if case.gguf or target.quantised else beside_stock(target, prompts, greedy, tokens)
        return Found(target.promise, here, stock)


def beside_stock(
    target: TargetModel, prompts: Seq[list[int]], plain: Seq[list[int]], tokens: int
) -> tuple[Promise, Count]:
    """Compare plain decoding with the model's own generate(); under ``stock`` the bits of all logits too."""
    count, model = Count(), target.model
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    for prompt, found in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        count.add(answer.sequences[0, len(prompt) :].tolist(), found)
        if target.stock:
            outpace.accelerate(model, "none", stock=True)
            own = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            outpace.restore(model)
            same = all(map(torch.equal, answer.logits, own.logits))
            if not same:
                raise SystemExit("under stock=True the logits of plain decoding are not those of generate()")
    if target.stock:
        return "same bits", count
    if target.dtype == torch.float64:
        return "same tokens", count
    return "not exact" if target.coarse else "same tokens but for near-ties", count


# -- the page --------------------------------------------------------------------------------------------


def row_of(case: Case, found: Found | None) -> str:
    """A row of the table; None for a case that was not measured."""
    head = [*case.key, "CPU"]
    if found is None:
        return "| " + " | ".join([*head, *[NOT_MEASURED] * 4]) + " |"
    promise, count = found.stock or ("no `generate()` of these weights", "")
    return "| " + " | ".join([*head, found.promise, str(found.here), promise, str(count)]) + " |"


def rows_of(page: str) -> dict[tuple[str, ...], str]:
    """The rows of a page's table, by the cells that name the case."""
    lines = [line for line in page[page.index(BEGIN) : page.index(END)].splitlines() if line.startswith("|")]
    return {tuple(cell.strip() for cell in line.split("|")[1:4]): line for line in lines[2:]}


def table(rows: Seq[str], count: int, tokens: int) -> str:
    """The table with what it was measured on, between its marks."""
    unmeasured = [
        f"| {' | '.join(cells)} | {here} | {NOT_MEASURED} | {stock} | {NOT_MEASURED} |"
        for *cells, here, stock in UNMEASURED
    ]
    threads = torch.get_num_threads()
    about = (
        f"{processor()}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__.partition('+')[0]}, "
        f"transformers {transformers.__version__}; {count} prompts, {tokens} tokens at most; "
        f"`{'`, `'.join(DRAFTERS)}`, alone and `{DRAFTERS[0]}` in a batch, greedy and at temperature "
        f"{SAMPLED.temperature} with top-p {SAMPLED.top_p}; beside `generate()` greedy, one prompt at a time."
    )
    return "\n".join([BEGIN, "", HEAD, *rows, *unmeasured, "", about, "", END])


def replaced(page: str, new: str) -> str:
    """A page with another table between its marks."""
    found, number = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: new, page, flags=re.DOTALL)
    if number != 1:
        raise SystemExit(f"{PAGE} has {number} places between {BEGIN} and {END}; it needs one")
    return found


def main(arguments: Seq[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Measure cases, and write each row as soon as it is measured, unless a promise is broken.

    Rows of cases that are left out stay as they are on the page.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only", default="", help="measure only the cases whose first cells contain this")
    given = parser.parse_args(arguments)
    cases = [case for case in CASES if given.only in " ".join(case.key)]
    if any(case.model == SMOLLM2 for case in cases) and not smollm2_path().is_dir():
        raise SystemExit("SmolLM2 is missing: run `make real` first")
    transformers.logging.set_verbosity_error()
    broken = False
    for case in cases:
        found = measured(case, given.prompts, given.tokens)
        say(row_of(case, found))
        for line in found.broken():
            broken = True
            say(f"broken: {line}")
        if not broken:
            page = PAGE.read_text("utf-8")
            known = rows_of(page) | {case.key: row_of(case, found)}
            rows = [known.get(one.key, row_of(one, None)) for one in CASES]
            PAGE.write_text(replaced(page, table(rows, given.prompts, given.tokens)), "utf-8")
    return int(broken)


if __name__ == "__main__":
    raise SystemExit(main())
