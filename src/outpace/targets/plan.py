"""The answer to "which step runs here, and why not another?"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NATIVE = "native"
FIXED = "its shapes are fixed"  # why steps are not native


class PassedOver(NamedTuple):
    """A plan that was not taken.

    Attributes:
        name: the plan's.
        reason: why not.
        exact: it is for bit-exact steps.
        tried: its step was made, and disproved.
    """

    name: str
    reason: str
    exact: bool
    tried: bool = False


@dataclass(frozen=True)
class StepPlan:
    """How a target's steps run; ``str`` is a table for people.

    Attributes:
        name: of the step: "invariant", "native", "exact", "packed" or "stock" (``step/plans.py``); what runs
            it, for a target that is not a transformers model's.
        exact: its logits have the same bits among any rows; see ``TargetModel.bit_exact``.
        why_inexact: reason why not; None if they have.
        passed_over: the plans before it in the list, with the reasons.
        packed: kernel -> number of linear layers whose weights are packed for it.
        row_step: the rows of a forward are padded to a multiple of this.
        layouts: layout of a forward -> number of those that ran: "flat" (no padding), "fixed" (shapes) and
            "padded" (a window of the cache).
        no_graphs: why forwards on a GPU are not captured as graphs, under static="auto"; empty if they are.
        no_trees: why forwards with branches on a GPU run on the model's own attention, not on the kernel for
            trees; empty if they run on it.
        no_flat: why prompts and steps do not share forwards on a CPU; empty if they do.
        dtype: the dtype that ``outpace.load`` chose on a CPU, and why; empty if there was nothing to choose.
        own_dtype: the dtype in the config of a model that ``outpace.load`` read; empty if it names none.
    """

    name: str = "stock"
    exact: bool = False
    why_inexact: str | None = "not tested"
    passed_over: tuple[PassedOver, ...] = ()
    packed: Mapping[str, int] = field(default_factory=dict)
    row_step: int = 1
    layouts: Counter[str] = field(default_factory=Counter, compare=False)
    no_graphs: str = field(default="", compare=False)
    no_trees: str = field(default="", compare=False)
    no_flat: str = field(default="", compare=False)
    dtype: str = field(default="", compare=False)
    own_dtype: str = field(default="", compare=False)

    @property
    def native(self) -> bool:
        """True if forwards are computed in C."""
        return self.name == NATIVE

    def why_not(self, name: str) -> str | None:
        """The reason why a plan was passed over; None if it was not."""
        reasons = [passed.reason for passed in self.passed_over if passed.name == name]
        return None if name == self.name or not reasons else reasons[-1]

    def __str__(self) -> str:
        bits = "bit-exact" if self.exact else f"not bit-exact: {self.why_inexact}"
        layers = (f"{count} layers packed by {kernel}" for kernel, count in self.packed.items())
        rows = [
            *((passed.name, f"no: {passed.reason}") for passed in self.passed_over),
            (self.name, "; ".join(["runs here", *layers, bits])),
            *([("graphs", f"no: {self.no_graphs}")] if self.no_graphs else []),
            *([("trees", f"no kernel: {self.no_trees}")] if self.no_trees else []),
            *([("flat", f"no: {self.no_flat}")] if self.no_flat else []),
            *([("dtype", self.dtype)] if self.dtype else []),
            ("forwards", ", ".join(f"{n} {name}" for name, n in self.layouts.most_common()) or "none yet"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)
