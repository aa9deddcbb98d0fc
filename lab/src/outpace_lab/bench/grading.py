"""Grades of answers: the number of a word problem, a program's tests, the overlap with a reference.

- ``number``: the last number of the answer is the expected one (GSM8K, Cobbe et al. 2021, arXiv
  2110.14168).
- ``program``: the answer completes the prompt to a program that passes its tests (HumanEval, Chen et al.
  2021, arXiv 2107.03374: pass@1).
- ``overlap``: ROUGE-L, the F1 of the longest common subsequence with a reference (Lin 2004, *ROUGE: A
  Package for Automatic Evaluation of Summaries*), by the package rouge-score, words stemmed.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from outpace.bench.items import Expected, Item, Suite
from outpace.bench.subject import spoken
from outpace.core import OutpaceError, install
from outpace.loading import Loaded

_WORKER = Path(__file__).parent / "workers" / "program_worker.py"
_SECONDS, _WALL, _MEMORY = 5, 20, 1 << 30
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# A model that continues a text continues with the next question.
_NEXT_QUESTION = re.compile(r"\n\s*Question:")
# Where a completion leaves the function (Chen et al. 2021, section 2.1).
_FUNCTION_ENDS = re.compile(r"\n(?=class |def |#|if |print|@|```|assert )")

Grader = Callable[[Item, Seq[int]], float | None]


@dataclass(frozen=True)
class Quality:
    """Grades of one method on the graded prompts of a suite.

    Attributes:
        kind: what was graded: "number", "program" or "overlap".
        score: the mean grade; the share that is right, or ROUGE-L.
        plain: plain decoding's on the same prompts.
        better, worse: numbers of prompts with a higher and a lower grade than plain decoding's.
    """

    kind: str
    prompts: int
    score: float
    plain: float
    better: int
    worse: int


def quality_of(kind: str, grades: Seq[float], plain: Seq[float]) -> Quality:
    """Compare the grades of a method with plain decoding's of the same prompts, one at least."""
    pairs = list(zip(grades, plain, strict=True))
    return Quality(
        kind=kind,
        prompts=len(pairs),
        score=statistics.fmean(grades),
        plain=statistics.fmean(plain),
        better=sum(own > other for own, other in pairs),
        worse=sum(own < other for own, other in pairs),
    )


def check_gradable(suites: Seq[Suite], run_code: bool) -> None:
    """Check that something can be graded, and by what is installed and allowed.

    Raises:
        OutpaceError: no prompt has an expected answer, programs may not be run, or a package is missing.
    """
    kinds = {item.expected.kind for suite in suites for item in suite.items if item.expected is not None}
    if not kinds:
        raise OutpaceError(
            "--grade finds nothing to grade: of the suites only gsm8k, humaneval and spec_bench have "
            "expected answers"
        )
    if "program" in kinds:
        if not run_code:
            raise OutpaceError(
                "--grade runs the programs that the model writes for humaneval, within limits of time, "
                "memory and files, without a sandbox; allow it with --run-code, in a container if you can"
            )
        if find_spec("resource") is None:
            raise OutpaceError("--grade of humaneval needs a POSIX system, to limit the programs; omit it")
    if "overlap" in kinds and find_spec("rouge_score") is None:
        raise OutpaceError(f"--grade of spec_bench needs rouge-score: {install('grade', 'outpace-lab')}")


def grader_of(subject: Loaded) -> Grader:
    """A function that grades an answer, from 0 to 1; None for a prompt without an expected answer.

    Equal answers to a prompt are graded once.
    """
    known: dict[tuple[str, str], float] = {}

    def grade(item: Item, answer: Seq[int]) -> float | None:
        if item.expected is None:
            return None
        # The decoder's text, with the space or indentation that ``spoken`` strips.
        text = spoken(subject, answer, strip=False)
        key = item.id, text
        if key not in known:
            known[key] = _GRADES[item.expected.kind](item, item.expected, text)
        return known[key]

    return grade


def _number(item: Item, expected: Expected, text: str) -> float:
    del item
    return float(last_number(text) == last_number(expected.text))


def last_number(text: str) -> Decimal | None:
    """The last number of a text, up to the next question if the text continues; None if there is none."""
    found = _NUMBER.findall(_NEXT_QUESTION.split(text, maxsplit=1)[0])
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def _program(item: Item, expected: Expected, text: str) -> float:
    completion = _FUNCTION_ENDS.split("\n" + text, maxsplit=1)[0][1:]
    return float(passes(f"{item.turns[0]}{completion}\n{expected.text}\n"))


def passes(program: str) -> bool:
    """True if a program runs to its end within limits of time, memory, files and network.

    It runs in a separate process and an empty folder, without the environment's variables and site packages.
    """
    with TemporaryDirectory(prefix="outpace-") as folder:
        command = [sys.executable, "-I", "-S", "-B", str(_WORKER), str(_SECONDS), str(_MEMORY)]
        try:
            done = subprocess.run(
                command,
                input=program.encode("utf-8", "replace"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                timeout=_WALL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout == b"passed"


def _overlap(item: Item, expected: Expected, text: str) -> float:
    del item
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score(expected.text, text)["rougeL"].fmeasure)


_GRADES: dict[str, Callable[[Item, Expected, str], float]] = {
    "number": _number,
    "program": _program,
    "overlap": _overlap,
}
