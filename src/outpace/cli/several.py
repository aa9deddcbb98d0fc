"""Several models for one server: their names, and what is known of them before they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.parts import ModelSource
from outpace.core import OutpaceError
from outpace.names import is_gguf, models_in, shown_name

if TYPE_CHECKING:
    from outpace.engine.engine import Engine
    from outpace.loading import Loaded
    from outpace.serve.admission import Limits
    from outpace.serve.room import Known
    from outpace.serve.router import Router

MOST = 4  # models that are loaded at once, by default


def chosen(
    given: list[str],
    keeps: bool,
    source: ModelSource,
    drafter: str,
    also: Mapping[str, str],
    adaptive: bool | None,
) -> tuple[ModelSource, Several | None]:
    """The options of the one model that is loaded at the start, or those of several; ``source`` has neither.

    Args:
        given: as for ``named_models``.
        keeps: whether there are options of how models are kept, which one model may have, too.
    """
    names = named_models(given, not keeps)
    if names is None:
        return replace(source, model=given[0] if given else None), None
    return source, Several(names, source, drafter, also, adaptive)


def named_models(given: list[str], plain: bool) -> dict[str, str | None] | None:
    """The models of a server by their names in requests; None for one that is loaded at the start.

    Args:
        given: models, or NAME=MODEL, or folders of models.
        plain: whether one model is loaded at the start, if it is given by itself.

    Raises:
        OutpaceError: two have one name, or a folder has none.
    """
    if plain and len(given) < 2 and not any(_named(one) or _folder(one) for one in given):
        return None
    if not given:
        return {shown_name(None): None}
    found = dict[str, str | None]()
    for one in given:
        path = Path(one).expanduser()
        models = _named(one) or _folder(one) or {path.name if path.exists() else one: one}
        for own, place in models.items():
            if not own or not place:
                raise OutpaceError(f"--model takes MODEL or NAME=MODEL; not {one!r}")
            if own in found:
                raise OutpaceError(f"two models are called {own!r}; give one as --model NAME={place}")
            found[own] = place
    return found


def _named(given: str) -> dict[str, str]:
    """The model that is given as NAME=MODEL, if it is."""
    name, equals, model = given.partition("=")
    return {name: model} if equals and not Path(given).expanduser().exists() else {}


def _folder(given: str) -> dict[str, str]:
    """The models in a folder, if it is one of several."""
    path = Path(given).expanduser()
    return models_in(path) if path.is_dir() else {}


@dataclass(frozen=True)
class Several:
    """The options of several models; ``source`` has those that all share."""

    models: Mapping[str, str | None]
    source: ModelSource
    drafter: str
    also: Mapping[str, str]
    adaptive: bool | None

    def check(self, single: Mapping[str, object]) -> None:
        """Refuse unknown names, and options that are not for several models.

        Args:
            single: the values of options that are for one model, by their names.

        Raises:
            OutpaceError: the message names the option.
        """
        for option, value in single.items():
            if value:
                raise OutpaceError(f"{option} is for one model that is loaded at the start; leave it out")
        own = self.source
        ours = {
            "--dtype": own.dtype != "auto",
            "--quantise": own.options.quantise,
            "--stock": own.options.stock,
            "--trust-remote-code": own.trust_remote_code,
            "--device": own.place not in (None, "cpu"),
        }
        rounded = [one for one in self.models.values() if is_gguf(one or "")]
        if rounded and (given := [option for option, value in ours.items() if value]):
            raise OutpaceError(f"{given[0]} is for transformers models, and {rounded[0]} is a GGUF file")
        if own.llamacpp and not rounded:
            raise OutpaceError("--llamacpp is for .gguf files, and there is none; leave it out")
        if own.backend != "auto" and not rounded:
            raise OutpaceError("--backend is for .gguf files, and there is none; leave it out")
        for model in self.models.values():
            for spec in (self.drafter, *self.also.values()):
                self._of(model).check_names(spec)

    def _of(self, model: str | None) -> ModelSource:
        return replace(
            self.source,
            model=model,
            llamacpp=self.source.llamacpp if is_gguf(model or "") else "",
            backend=self.source.backend if is_gguf(model or "") else "auto",
        )

    def plan(
        self,
        limits: Limits,
        room: tuple[int, float, int | None],
        idle: float | None,
        store: Path | None,
    ) -> Callable[[], Router]:
        """What makes the host of the models, in the event loop; ``room`` are arguments of ``Room``.

        Raises:
            OutpaceError: as ``known``.
        """
        from outpace.serve.room import Room
        from outpace.serve.router import Router

        return partial(Router, self.known(limits), limits, Room(*room), idle=idle, store=store)

    def known(self, limits: Limits) -> list[Known]:
        """What is known of the models.

        Raises:
            OutpaceError: one is not on this machine.
        """
        from outpace.loading.placement import device_of
        from outpace.loading.sizes import bytes_of, weights_of
        from outpace.serve.room import Known

        place = self.source.place
        own = device_of(place if isinstance(place, str) else None)
        found = []
        for name, model in self.models.items():
            device = device_of("cpu") if is_gguf(model or "") else own
            size = bytes_of(model, self.source.dtype, str(device))
            files = tuple(weights_of(model))
            found.append(Known(name, size, self._loads(self._of(model), limits), device, files))
        return found

    def _loads(
        self, source: ModelSource, limits: Limits
    ) -> Callable[[dict[str, Any]], tuple[Loaded, Engine]]:
        from outpace.engine.usual import usual_drafter
        from outpace.loading import load
        from outpace.serve.engine import make_engine

        adaptive = "auto" if self.adaptive is None else self.adaptive

        def loads(room: dict[str, Any]) -> tuple[Loaded, Engine]:
            loaded = load(
                source.model,
                source.dtype,
                source.place,
                trust_remote_code=source.trust_remote_code,
                llamacpp=source.llamacpp,
                backend=source.backend,
                seq2seq=source.seq2seq,
                **vars(source.options),
            )
            drafter = self.drafter or usual_drafter(loaded.target)
            return loaded, make_engine(
                loaded, drafter, limits, self.also, None, True, adaptive=adaptive, **room
            )

        return loads
