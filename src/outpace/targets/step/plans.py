"""Which step runs here: the first of ``PLANS`` that is neither refused nor disproved.

A plan is refused by what is known of the model, the machine and the options. Otherwise its step is made, and
it is disproved if the step is not what the plan promises: bit-exact, or packed. The last plan is the model as
it is, which nothing refuses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from outpace.core import TargetOptions, UnsupportedModel
from outpace.targets.cpu.exact_attention import EXACT
from outpace.targets.cpu.linear import Packer, piecewise, tail_step, why_unproven
from outpace.targets.cpu.packing import NO_MEMORY, copies_fit, why_not_packed
from outpace.targets.cpu.trials import chosen_kernel
from outpace.targets.gpu.invariant import TRITON, invariant_norm, why_norm_unproven
from outpace.targets.inputs.config import context_of, family, runs_on_gpu
from outpace.targets.inputs.masks import INVARIANT
from outpace.targets.inputs.refusals import STOCK, why_not_exact
from outpace.targets.inputs.surgery import exchange
from outpace.targets.kernel import Kernel
from outpace.targets.native.fitting import why_not_native
from outpace.targets.native.runner import NativeRunner
from outpace.targets.plan import FIXED, NATIVE, PassedOver, StepPlan
from outpace.targets.step.modules import Modules

Replace = Callable[[nn.Module], nn.Module | None]
Bits = Callable[[], str | None]


@dataclass
class StepRequest:
    """A model and the options requested for its steps.

    Attributes:
        chains: the model takes chains only.
    """

    model: Any
    options: TargetOptions
    chains: bool = False
    _packs: dict[bool, bool] = field(default_factory=dict)

    @property
    def named(self) -> str | None:
        """The plan that is asked for."""
        name: str | None = self.options.of_step["plan"]
        return name

    @cached_property
    def on_gpu(self) -> bool:
        return runs_on_gpu(self.model)

    @cached_property
    def why_not_native(self) -> str | None:
        """The reason why its forwards are not one call into C; None if they are."""
        if self.on_gpu:
            return "it is for CPUs"
        if why := self._fixed or self._alone or why_not_native(self.model):
            return why
        return None if self.named == NATIVE or copies_fit(self.model) else NO_MEMORY

    @cached_property
    def why_inexact(self) -> str | None:
        """The reason not to try a bit-exact step; None to try one."""
        asked = self.options.of_step["exact"]
        exact = True if asked == "auto" and self.named in _EXACT else asked
        why = why_not_exact(self.model, exact, native=self.why_not_native is None)
        return self._alone or why or (None if self.on_gpu else self._fixed)

    def packs(self, exact: bool) -> bool:
        """Whether to pack weights; decided once, since it depends on the free memory."""
        if exact not in self._packs:
            asked = not exact and self.named == Packed.name
            self._packs[exact] = not why_not_packed(self.model, exact, asked)
        return self._packs[exact]

    def rounded_model(self, model: Any, attention: str) -> Any:
        """A copy of the model, or of some of its layers, with rounded weights, and all else as it is."""
        packer = _packer(self, True, exact=True)
        return exchange(model, _Replaced(packer), attention)

    @property
    def _fixed(self) -> str | None:
        return FIXED if self.options.static else None

    @property
    def _alone(self) -> str | None:
        return "it takes chains only, which run on the model's own attention" if self.chains else None


class Plan(ABC):
    """A way to run steps.

    Attributes:
        name: in reports.
        exact: its steps are bit-exact.
    """

    name: ClassVar[str]
    exact: bool = False

    @abstractmethod
    def why_refused(self, asked: StepRequest) -> str | None:
        """The reason not to make its step; None to make it."""

    @abstractmethod
    def make(self, asked: StepRequest) -> Modules:
        """The modules that its steps run on.

        Raises:
            UnsupportedModel: they cannot be made.
        """

    def why_unproven(self, asked: StepRequest, step: Modules, bits: Bits) -> str | None:
        """The reason why a step is not what the plan promises; None if it is.

        Args:
            bits: tests whether the logits of a row depend on the rows it is fed with.
        """
        return None


class Invariant(Plan):
    """Bit-exact layers on a GPU (``gpu/invariant.py``)."""

    name = "invariant"
    exact = True

    def why_refused(self, asked: StepRequest) -> str | None:
        return asked.why_inexact if asked.on_gpu else "it is for GPUs"

    def make(self, asked: StepRequest) -> Modules:
        packer = Packer(asked.model, False, True, kernel=TRITON)
        replaced = _Replaced(packer, lambda module: invariant_norm(module, asked.model.dtype))
        step = exchange(asked.model, replaced, INVARIANT)
        return Modules(asked.model, step, replaced.held, packer, chains=asked.chains)

    def why_unproven(self, asked: StepRequest, step: Modules, bits: Bits) -> str | None:
        return why_unproven(step.step) or why_norm_unproven(step.step) or bits()


class Native(Plan):
    """The whole forward in C on a CPU (``native/runner.py``), bit-exact by the order of its sums."""

    name = NATIVE
    exact = True

    def why_refused(self, asked: StepRequest) -> str | None:
        return asked.why_not_native

    def make(self, asked: StepRequest) -> Modules:
        model = asked.model
        context = context_of(model.config.get_text_config(decoder=True))
        runner = NativeRunner(model, context, asked.options.of_step["quantise"] or "")
        return Modules(model, model, native=runner)

    def why_unproven(self, asked: StepRequest, step: Modules, bits: Bits) -> str | None:
        return bits()


class Exact(Plan):
    """The model's own layers on a CPU, with exact products and attention."""

    name = "exact"
    exact = True

    def why_refused(self, asked: StepRequest) -> str | None:
        if asked.on_gpu:
            return "it is for CPUs"
        return asked.why_inexact

    def make(self, asked: StepRequest) -> Modules:
        packer = _packer(asked, asked.packs(exact=True), exact=True)
        replaced = _Replaced(packer, kept=piecewise)
        step = exchange(asked.model, replaced, EXACT)
        return Modules(asked.model, step, replaced.held, packer, tail_step(asked.model), chains=asked.chains)

    def why_unproven(self, asked: StepRequest, step: Modules, bits: Bits) -> str | None:
        return why_unproven(step.step) or bits()


class Packed(Plan):
    """The model's own layers on a CPU, with packed or rounded weights."""

    name = "packed"

    def why_refused(self, asked: StepRequest) -> str | None:
        if asked.on_gpu:
            return "it is for CPUs"
        if asked.options.of_step["quantise"]:
            return None
        return why_not_packed(asked.model, exact=False, asked=asked.named == self.name)

    def make(self, asked: StepRequest) -> Modules:
        every = asked.named == self.name and not asked.options.of_step["quantise"]
        kernel = chosen_kernel(asked.model.dtype) if every else None
        packer = _packer(asked, asked.packs(exact=False), exact=False, kernel=kernel)
        replaced = _Replaced(packer)
        step = exchange(asked.model, replaced, None)
        return Modules(asked.model, step, replaced.held, packer, chains=asked.chains)

    def why_unproven(self, asked: StepRequest, step: Modules, bits: Bits) -> str | None:
        return None if step.packed else "no kernel takes its layers"


class Stock(Plan):
    """The model as it is."""

    name = "stock"

    def why_refused(self, asked: StepRequest) -> str | None:
        return "quantise rounds its weights" if asked.options.of_step["quantise"] else None

    def make(self, asked: StepRequest) -> Modules:
        return Modules(asked.model, asked.model, chains=asked.chains)


PLANS: tuple[Plan, ...] = (Invariant(), Native(), Exact(), Packed(), Stock())
_EXACT = frozenset(plan.name for plan in PLANS if plan.exact)


def choose(
    asked: StepRequest, bits: Callable[[Modules], str | None], plans: Sequence[Plan] = PLANS
) -> tuple[Plan, Modules, StepPlan]:
    """The first plan that is neither refused nor disproved, its step, and the report.

    Args:
        bits: tests a step's bits; it keeps no reference to one that it disproves.

    Raises:
        UnsupportedModel: no plan serves exact=True, or the one that is asked for does not fit; the
            message has the reason.
    """
    passed: list[PassedOver] = []
    reason: str | None
    for plan in plans:
        step, tried = None, False
        if asked.named not in (None, plan.name):
            reason = f"plan={asked.named!r} asks for another"
        elif asked.options.of_step["exact"] is True and not plan.exact:
            reason = "exact=True asks for another"
        else:
            reason = plan.why_refused(asked)
        if reason is None:
            step, reason = _tried(plan, asked, bits)
            tried = True
        if step is not None:
            inexact = None if plan.exact else STOCK if asked.options.stock else _why_inexact(asked, passed)
            report = StepPlan(plan.name, plan.exact, inexact, tuple(passed), step.packed, step.row_step)
            return plan, step, report
        passed.append(PassedOver(plan.name, reason or "", plan.exact, tried))
    raise _refusal(asked, passed)


def _tried(
    plan: Plan, asked: StepRequest, bits: Callable[[Modules], str | None]
) -> tuple[Modules | None, str | None]:
    """A plan's step, or None and the reason why not: its copies of weights must not count as used memory.

    Raises:
        UnsupportedModel: a plan that promises no bits cannot be made; those after it could not either.
    """
    try:
        step = plan.make(asked)
        reason = plan.why_unproven(asked, step, lambda: bits(step))
    except UnsupportedModel as error:
        if not plan.exact:
            raise
        return None, str(error)
    return (None, reason) if reason else (step, None)


def _why_inexact(asked: StepRequest, passed: Sequence[PassedOver]) -> str | None:
    """The reason why steps are not bit-exact: what disproved them, or why none was tried."""
    usual = f"plan={asked.named!r} is not bit-exact" if asked.named else asked.why_inexact
    return next((plan.reason for plan in passed if plan.exact and plan.tried), usual)


def _refusal(asked: StepRequest, passed: Sequence[PassedOver]) -> UnsupportedModel:
    """The error for options that no plan serves."""
    name = family(asked.model)
    if asked.named is None:
        return UnsupportedModel(f"{name} is not bit-exact: {_why_inexact(asked, passed)}; leave exact out")
    reason = next(plan.reason for plan in passed if plan.name == asked.named)
    return UnsupportedModel(f"{name} has no {asked.named} steps: {reason}; leave plan out")


class _Replaced:
    """Replacement of modules in a copy of a model, which notes those with copies of weights.

    Args:
        packer: replaces linear layers.
        more: replaces others that have weights.
        kept: replaces those whose weights the step reads from the model, or that have none.
    """

    def __init__(self, packer: Packer, more: Replace | None = None, kept: Replace | None = None) -> None:
        self.held: list[nn.Module] = []
        self._packer, self._more, self._kept = packer, more, kept

    def __call__(self, module: nn.Module) -> nn.Module | None:
        found = self._packer(module) or (self._more and self._more(module))
        if found is not None:  # whatever its kernel, it has a copy of the weights, or these very tensors
            self.held.append(module)
            return found
        return self._kept and self._kept(module)


def _packer(asked: StepRequest, packs: bool, exact: bool, kernel: Kernel | None = None) -> Packer:
    """A packer of a model's layers; ``kernel``: for all of them, whether they gain from it or not."""
    return Packer(asked.model, packs, exact, asked.options.of_step["quantise"] or "", kernel)
