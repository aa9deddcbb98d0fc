"""Options of a target, the same wherever one is made: ``Target``, ``load``, ``accelerate``, the commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from outpace.core.errors import OutpaceError, check_known, near

# The drafter where none is named. It keeps nothing of a request for later ones, which may be another user's;
# "suffix" remembers earlier outputs.
DEFAULT_DRAFTER = "suffix:memory=0"

# Those that models are loaded in, by torch's names.
DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp64": "float64"}

# Types that weights are rounded to.
ROUNDINGS = ("int8", "int4")

# Ways to run steps (``targets/step/plans.py``).
PLAN_NAMES = ("invariant", "native", "exact", "packed", "stock")

_OFF = (None, False, "auto")


@dataclass(frozen=True)
class TargetOptions:
    """How a target runs the steps of a transformers model.

    Which step runs, and why not another, is ``target.plan``. An option of True means: this, or an error with
    the reason.

    Attributes:
        static: fixed shapes: a forward with logits covers a power of two of slots, rows per slot and columns,
            up to 128 rows per slot and 512 in total; wider ones and those without logits (chunks of prompts)
            have only the width they need. On a CUDA device each shape is captured as a graph on first use,
            and then replayed. "auto" does this for a model on one CUDA device, in a cache that grows, over
            which shapes are captured anew; if they cannot be captured, forwards run one kernel at a time, and
            a warning says why. True uses a cache that does not grow, on any device.
        check: run the self-test. "auto" does not repeat it where the user's cache has the answer for this
            model, these options and this machine (``step/record.py``); True always runs it. Disable it only
            for a model that has passed it.
        runner: runner of forwards of fixed shapes; None uses graphs if the model is on one CUDA device.
        exact: make the logits of a row bit-identical for any number of rows, tree, other sequences, threads
            and chunks of the prompt. True refuses a model for which this fails; "auto" tries it on a CPU, for
            bfloat16 and float16, where near-ties would otherwise differ, and for native steps; see
            ``bit_exact``. On a CPU all linear layers then use compiled products. On a GPU linear layers,
            norms and attention then run on Triton kernels (``gpu/invariant.py``).
        plan: the name of the plan to take, for comparisons and tests: "native", "exact", "packed", "stock" or
            "invariant" (``targets/step/plans.py``). None takes the first that fits the model, the machine and
            the free memory.
        quantise: round the weights of linear layers of a bfloat16 model on a CPU, in a copy: "int8" to 8
            bits with a scale per output and 32 inputs; "int4" to 4 bits with a zero as well (to 8 bits in
            the head, and if the inputs are not a multiple of 32). A product's rows are rounded to 8 bits with
            a scale per 32 numbers. This changes tokens: they are those of plain decoding with the rounded
            weights. Layers that a checkpoint has rounded stay as they are. Without compiled functions,
            torch's kernels do not round rows, "int8" has a scale per output, and "int4" takes a multiple of
            16 outputs.
        stock: run steps on the model's own modules, as plan="stock" does, and let engines read a prompt in
            one forward. Under stock=True plain decoding of one prompt at a time has the bits of transformers'
            generate(); drafted rows have others (docs/concepts/exactness.md).

    Raises:
        OutpaceError: an unknown value; or options that do not go together.
    """

    static: bool | Literal["auto"] = "auto"
    check: bool | Literal["auto"] = "auto"
    runner: Any = None
    exact: bool | Literal["auto"] = "auto"
    plan: str | None = None
    quantise: str | None = None
    stock: bool = False

    def __post_init__(self) -> None:
        for name in ("static", "exact", "check"):
            if not isinstance(value := getattr(self, name), bool) and value != "auto":
                raise OutpaceError(f"{name} must be True, False or 'auto', not {value!r}")
        if not isinstance(self.stock, bool):
            raise OutpaceError(f"stock must be True or False, not {self.stock!r}")
        for name, known in (("quantise", ROUNDINGS), ("plan", PLAN_NAMES)):
            if (value := getattr(self, name)) not in (None, *known):
                hint = near(str(value), known)
                raise OutpaceError(f"{name} must be {' or '.join(known)}, not {value!r}.{hint}".rstrip("."))
        if self.static is not True and self.runner is not None:
            raise OutpaceError("a runner is for forwards of fixed shapes: give static=True too")
        if self.stock and (names := [name for name in self.named if name not in ("check", "stock")]):
            raise OutpaceError(f"stock=True runs the model's own modules: leave {names[0]} or stock out")

    @classmethod
    def of(cls, given: Mapping[str, Any], what: str, others: Iterable[str] = ()) -> TargetOptions:
        """Options by name; for errors, the function ``what`` that was called and its other arguments."""
        known = [one.name for one in fields(cls)]
        check_known(what, given, known, [*known, *others])
        return cls(**given)

    @property
    def named(self) -> list[str]:
        """The options that ask for something."""
        return [one.name for one in fields(self) if getattr(self, one.name) not in _OFF]

    @property
    def of_step(self) -> dict[str, Any]:
        """Those that decide which step runs, by name; ``stock`` in terms of the others."""
        plan = "stock" if self.stock else self.plan
        return {"exact": self.exact, "plan": plan, "quantise": self.quantise}


USUAL = TargetOptions()


def dtype_name(dtype: Any) -> str:
    """torch's name of a dtype, from that, from a usual short one (fp16, bf16), or from the dtype itself."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)
