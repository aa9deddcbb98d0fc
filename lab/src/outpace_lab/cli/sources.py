"""The model that a command of the laboratory loads, which may be grown in memory. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from outpace.cli import screen
from outpace.cli.parts import ModelSource
from outpace.core import OutpaceError
from outpace_lab.bench.llama_shapes import load_shape

if TYPE_CHECKING:
    from outpace.loading import Loaded


def source_of(like: str, *given: Any, **more: Any) -> ModelSource:
    """The source of a model, grown to the shape ``like`` if there is one; the rest is of ``ModelSource``."""
    return GrownSource(*given, **{**more, "like": like}) if like else ModelSource(*given, **more)


@dataclass(frozen=True)
class GrownSource(ModelSource):
    """A model that is grown to the shape ``like`` in memory."""

    like: str = ""

    def check_names(self, drafter: str = "", verifier: str = "match") -> None:
        """Refuse unknown names, the shape's too, before torch is imported."""
        super().check_names(drafter, verifier)
        load_shape(self.like)
        if not isinstance(self.place, str | None):
            raise OutpaceError("--like grows a model on one device; leave --device-map out")
        if self.llamacpp:
            raise OutpaceError("--llamacpp is for .gguf files, which --like does not grow; leave one out")

    def load(self, drafter: str = "none", verifier: str = "match", references: bool = False) -> Loaded:
        """Load the model and grow it, after checking the drafter and the verifier."""
        self.check_names(drafter, verifier)
        from outpace_lab.bench.grown import load_grown

        with screen.busy(f"loading {self.model or 'the embedded model'} ..."):
            self.check(drafter, verifier, references)
            return load_grown(
                self.model,
                self.like,
                self.dtype,
                cast("str | None", self.place),  # ``check_names`` refuses others
                trust_remote_code=self.trust_remote_code,
                options=self.options,
            )
