"""Which step runs, what was passed over and why; and the layouts of forwards."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outpace
from models import tiny_llama
from outpace import Target
from outpace.core import OutpaceError, TargetOptions, UnsupportedModel
from outpace.targets import CausalTarget
from outpace.targets.batch import Batch
from outpace.targets.gpu.graphs import Eager
from outpace.targets.plan import PassedOver, StepPlan
from outpace.targets.step.plans import PLANS, Plan, StepRequest, choose

PLAIN = TargetOptions(exact=False)


class Noted(Plan):
    """A plan that is refused or disproved for given reasons."""

    def __init__(
        self, name: str, exact: bool, refused: str | None = None, disproved: str | None = None
    ) -> None:
        self.name, self.exact = name, exact  # type: ignore[misc]
        self._refused, self._disproved, self.made = refused, disproved, 0

    def why_refused(self, asked: StepRequest) -> str | None:
        return self._refused

    def make(self, asked: StepRequest) -> Any:
        self.made += 1
        return SimpleNamespace(packed={}, row_step=1)

    def why_unproven(self, asked: StepRequest, step: Any, bits: Any) -> str | None:
        return self._disproved


def test_the_first_that_is_neither_refused_nor_disproved_is_taken() -> None:
    plans = [Noted("a", True, refused="of a"), Noted("b", True, disproved="of b"), Noted("c", False)]
    last, asked = Noted("d", False), StepRequest(tiny_llama(), PLAIN)
    taken, _, plan = choose(asked, lambda _: None, [*plans, last])
    assert taken is plans[2] and [one.made for one in [*plans, last]] == [0, 1, 1, 0]
    assert plan.name == "c" and not plan.exact and plan.why_inexact == "of b"
    assert plan.passed_over == (PassedOver("a", "of a", True), PassedOver("b", "of b", True, tried=True))
    assert plan.why_not("b") == "of b" and plan.why_not("c") is plan.why_not("d") is None


def test_an_option_of_true_means_this_plan_or_its_reason() -> None:
    plans = [Noted("b", True, disproved="of b"), Noted("c", False)]
    with pytest.raises(UnsupportedModel, match="is not bit-exact: of b; leave exact out"):
        choose(StepRequest(tiny_llama(), TargetOptions(exact=True)), lambda _: None, plans)
    assert not plans[1].made


def test_the_last_plan_is_the_model_as_it_is() -> None:
    model = tiny_llama(dtype=torch.float64)
    plan = Target(model).plan
    assert [one.name for one in PLANS] == ["invariant", "native", "exact", "packed", "stock"]
    assert [one.name for one in plan.passed_over] == [one.name for one in PLANS[:-1]]
    assert all(one.reason and not one.tried for one in plan.passed_over)
    assert plan.name == "stock" and "float64" in plan.why_inexact


def test_it_prints_as_a_table() -> None:
    passed = PassedOver("invariant", "it is for GPUs", True), PassedOver("exact", "of bits", True, True)
    plan = StepPlan(
        "packed", False, "of bits", passed, {"compiled": 43}, 1, Counter({"padded": 7, "fixed": 3})
    )
    assert str(plan).splitlines() == [
        "invariant  no: it is for GPUs",
        "exact      no: of bits",
        "packed     runs here; 43 layers packed by compiled; not bit-exact: of bits",
        "forwards   7 padded, 3 fixed",
    ]
    assert str(StepPlan(exact=True, why_inexact=None)).splitlines() == [
        "stock     runs here; bit-exact",
        "forwards  none yet",
    ]


def fed(target: CausalTarget, *widths: int) -> None:
    cache = target.new_cache(slots=len(widths), length=256)
    target.forward(cache, Batch.of({cache.allocate(): [1] * width for width in widths}))


def test_layouts_of_forwards_are_counted() -> None:
    target = CausalTarget(tiny_llama(context=256), plan="stock")
    assert not target.plan.layouts  # those of its self-test are not
    for widths in ([4], [9, 1, 1], [90, 2, 1], [3, 3]):  # the row of 90 has a window of its own
        fed(target, *widths)
    assert target.plan.layouts == {"padded": 5}
    assert not target.some_layers([0]).plan.layouts
    fixed = CausalTarget(tiny_llama(), static=True, runner=Eager())
    fed(fixed, 3, 1)
    assert fixed.plan.layouts == {"fixed": 1}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, "yes", "True, False or 'auto'") for name in ("exact", "check")),
        ("stock", "auto", "True or False"),
        ("check", None, "True, False or 'auto'"),
        ("static", 1, "True, False or 'auto'"),
    ],
)
def test_unknown_values_of_options_are_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(OutpaceError, match=f"{name} must be {words}, not {value!r}"):
        Target(tiny_llama(), **{name: value})


def test_options_that_do_not_go_with_a_call_are_refused() -> None:
    model = tiny_llama()
    with pytest.raises(OutpaceError, match=r"static is for outpace\.Target, not for .* leave it out"):
        outpace.accelerate(model, static=True)
    with pytest.raises(OutpaceError, match=r"check is for outpace\.Target, not for .* leave it out"):
        outpace.accelerate(model, check=False)
    outpace.accelerate(model, "none", check="auto", static=False)  # as they are anyway
    with pytest.raises(OutpaceError, match=r"exact is for transformers models, and m\.gguf is a"):
        outpace.load("m.gguf", exact=True, backend="llamacpp")
    with pytest.raises(OutpaceError, match=r"a runner is .* give static=True too"):
        Target(model, runner=Eager())
    with pytest.raises(OutpaceError, match="leave quantise or stock out"):
        Target(model, stock=True, quantise="int8")
