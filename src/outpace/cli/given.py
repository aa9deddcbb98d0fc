"""Options that several commands take, as dataclasses; a command's own class derives from those it has."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from outpace.cli import options as o
from outpace.cli.parts import ModelSource
from outpace.cli.place import place_of
from outpace.core import TargetOptions

if TYPE_CHECKING:
    from outpace.loading.placement import Place


def taking(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose last argument is an object: the fields of its class are the options.

    ``--help`` lists the fields of the bases in their order, then those of the class itself.
    """
    hints, lineage = get_type_hints(kind, include_extras=True), inspect.getmro(kind)

    def place(one: dataclasses.Field[Any]) -> int:
        owners = [
            at for at, cls in enumerate(lineage) if one.name in getattr(cls, "__dataclass_fields__", ())
        ]
        return owners[-1] or len(lineage)

    options = [
        inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name]
        )
        for one in sorted(dataclasses.fields(kind), key=place)
    ]

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        *before, _ = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(*(values.pop(one.name) for one in before), kind(**values))

        run.__dict__["__signature__"] = inspect.Signature([*before, *options])  # which typer reads
        run.__annotations__ = {}
        return run

    return decorated


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    model: o.ModelName = None


@dataclass(frozen=True, kw_only=True)
class LoadingOptions:
    """How a model is loaded."""

    device: o.Device = None
    dtype: o.Dtype = "auto"
    trust_remote_code: o.Trust = False
    llamacpp: o.LlamaCpp = ""
    backend: o.Backend = "auto"
    threads: o.Threads = None

    def source(self, model: str | None, **more: Any) -> ModelSource:
        """A model that is loaded so; ``more`` are further arguments of ``ModelSource``."""
        own = {"place": self.device, "dtype": self.dtype, "trust_remote_code": self.trust_remote_code}
        return ModelSource(model, **{**own, "llamacpp": self.llamacpp, "backend": self.backend, **more})


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a target's steps are computed."""

    quantise: o.Quantise = None
    stock: o.Stock = False

    def steps(self) -> TargetOptions:
        return TargetOptions(quantise=self.quantise, stock=self.stock)


@dataclass(frozen=True, kw_only=True)
class PlaceOptions(LoadingOptions):
    """Where a model is loaded: on one device, on several, or in several processes."""

    device_map: o.DeviceMap = None
    parallel: o.Parallel = None
    parallel_timeout: o.ParallelTimeout = 120.0

    def place(self, model: str | None) -> Place:
        return place_of(
            self.device,
            self.device_map,
            self.parallel,
            self.parallel_timeout,
            model,
            self.dtype,
            self.trust_remote_code,
        )


@dataclass(frozen=True, kw_only=True)
class DraftingOptions:
    """What drafts, and what verifies."""

    drafter: o.DefaultDrafterSpec = ""
    profile: o.ProfileFile = None
    verifier: o.VerifierName = "match"
    adaptive: o.Adaptive = None
    observer: o.ObserverSpec = ""
