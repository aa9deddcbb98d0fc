"""What makes decoding slower than it could be is said, with the remedy: each reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models import tiny_llama
from outpace.core import SamplingParams, TargetOptions
from outpace.drafters import load_drafter
from outpace.engine import slow
from outpace.engine.engine import Engine
from outpace.engine.slow import reasons
from outpace.loading import load
from outpace.native import build, layers
from outpace.targets.plan import PassedOver, StepPlan
from outpace.testing import ToyTarget
from outpace.verify import load_verifier

NO_COMPILER = "there is no C compiler; install gcc or clang, or set CC"

FAST = StepPlan("native", True, "")


def target(taken: StepPlan = FAST, device: str = "cpu", **options: Any) -> Any:
    """What the reasons are derived from."""
    asked = TargetOptions(**options)
    return SimpleNamespace(
        plan=taken, device=torch.device(device), options=asked, quantised="", dtype=torch.float32
    )


def not_native(why: str) -> StepPlan:
    return StepPlan("packed", False, "", (PassedOver("native", why, False),))


def test_the_usual_steps_have_none() -> None:
    assert reasons(load(device="cpu").target) == () == reasons(target()) == reasons(ToyTarget())


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "functions", lambda dtype: NO_COMPILER)
    assert reasons(target(not_native(NO_COMPILER))) == (
        f"steps run without compiled functions: {NO_COMPILER}",
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (target(stock=True), "leave stock out"),
        (target(StepPlan("native", True, "", own_dtype="bfloat16")), "weights are float32, as asked for"),
        (target(not_native("plan='exact' asks for another"), plan="exact"), "leave plan out"),
        (target(not_native("its shapes are fixed")), "leave static out"),
        (target(not_native("there are no compiled steps for a Mine")), "models.md names the families"),
        (target(device="cuda", static=False), "one kernel at a time: static is off"),
    ],
)
def test_a_target(given: Any, told: str) -> None:
    (found,) = reasons(given)
    assert told in found and "\n" not in found
    assert reasons(SimpleNamespace(**{**vars(given), "options": None, "inner": given})) == (found,)


def test_a_dtype_that_was_not_asked_for_is_no_reason() -> None:
    plan = StepPlan("native", True, "", dtype="float32, since ...", own_dtype="bfloat16")
    assert reasons(target(plan)) == () == reasons(target(device="cuda", static=True))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file" / "below"))
    (found,) = reasons(target())
    assert "compiled in each process" in found and "set OUTPACE_CACHE" in found
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    assert build.why_compiled_anew() is None


def test_no_governor() -> None:
    def told(spec: str, verifier: str = "match", adaptive: Any = False) -> tuple[str, ...]:
        engine = Engine(ToyTarget(), spec, verifier, adaptive=adaptive)
        parts = engine.target, load_drafter(spec), engine.governor, load_verifier(verifier)
        return reasons(*parts)

    (found,) = told("suffix")
    assert "leave adaptive out" in found
    assert told("none") == () == told("suffix", adaptive="auto") == told("suffix", "rejection")


def test_it_is_in_the_stats_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(ToyTarget(), "suffix", adaptive=False)
    (found,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=2))
    assert "leave adaptive out" in found.stats.slow[0]
    slow.tell.cache_clear()
    for _ in range(2):
        slow.tell("because of this")
    assert [record.message for record in caplog.records] == ["because of this"]


def test_the_command_line_and_accelerate_say_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    import outpace
    from outpace.cli.observing import engine_of

    engine_of(load(device="cpu"), "suffix", "match", 1, False)
    assert "slower than it could be: nothing decides" in " ".join(capsys.readouterr().err.split())
    slow.tell.cache_clear()
    model = outpace.accelerate(tiny_llama(), "suffix", adaptive=False)
    assert "slower than it could be: nothing decides" in caplog.text
    # A single call does not pay for faster steps, so nothing is slower than it could be.
    caplog.clear()
    slow.tell.cache_clear()
    ids = torch.tensor([[1, 2, 3]])
    outpace.restore(model).generate(ids, max_new_tokens=2, custom_generate=outpace.decode())
    assert "slower" not in caplog.text
