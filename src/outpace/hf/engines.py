"""Engines of one model, kept between calls of generate(): one per thread that is decoding."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from outpace.cache import Cache, KVCache, Slot
from outpace.core import USUAL, OutpaceError, TargetOptions, UnsupportedModel
from outpace.drafters.base import Drafter
from outpace.drafters.none import NoDraft
from outpace.engine.engine import Engine
from outpace.engine.observer import Learner
from outpace.engine.parts import Adaptive
from outpace.engine.slow import reasons, tell
from outpace.engine.usual import usual_drafter
from outpace.policy.governor import Governor
from outpace.sequence import Sequence
from outpace.targets import Target, TargetModel
from outpace.targets.inputs.attributes import fingerprint
from outpace.targets.stock.seq2seq_cache import Seq2SeqCache
from outpace.verify import Verifier, load_verifier

LayerRows = tuple[Tensor, Tensor]

# A single call does not pay for packed weights and tests of bits.
ONE_CALL = TargetOptions(plan="stock")
_ANOTHER = "the learner was made for another model, or it has changed; make one"


class Kept(NamedTuple):
    """Committed rows of a sequence that ended, per layer keys and values, [1, heads, n, size].

    Attributes:
        own: a row per token except the last.
        cross: the rows of an encoder-decoder model's source; otherwise empty.
    """

    own: list[LayerRows]
    cross: list[LayerRows]


# The state and options with which each model passed its target's self-test, so that decode() need not
# repeat it. Other options make other steps.
_passed: WeakKeyDictionary[Any, tuple[Any, int, TargetOptions]] = WeakKeyDictionary()


def _state(model: Any, quantise: str | None) -> tuple[Any, ...]:
    """Key of a target: another dtype, device, attention, vocabulary, rounding or module needs another one."""
    if not isinstance(model, PreTrainedModel):
        return ()  # Target refuses it
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    weights = [getattr(end, "weight", None) for end in ends]  # other ends too, which Target refuses
    places = [(weight.device, tuple(weight.shape)) for weight in weights if weight is not None]
    attention = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    kinds = hash(tuple(map(type, model.modules())))
    return (model.dtype, attention, quantise, *places, kinds)


def _made(model: Any, options: TargetOptions, changed: str | None) -> TargetModel:
    """A target of a model; an error names what was changed in it since the one before, if there was one."""
    try:
        return Target(model, **vars(options))
    except UnsupportedModel as error:
        raise error if changed is None else UnsupportedModel(f"{changed}, which fails: {error}") from error


class RowEngine(Engine):
    """An engine with a cache per call, which can keep the rows of sequences that end."""

    kept: dict[Sequence, Kept] | None = None

    def open(self, slots: int, length: int, keep: bool) -> None:
        """Make the cache, with ``slots`` slots of ``length`` rows, drafts included.

        Args:
            keep: copy the rows of each sequence that leaves into ``kept``.
        """
        self.make_room(slots, length)
        self.kept = {} if keep else None
        self._batch.leaving = None if self.kept is None else partial(_keep, self.kept)

    def close(self) -> None:
        """Free the cache, as transformers does after each call, and release the engine to any thread."""
        self.make_room(1, 1)
        self.kept = self._batch.leaving = None
        self._turn.release()


def _keep(kept: dict[Sequence, Kept], sequence: Sequence, cache: Cache, slot: Slot) -> None:
    """Copy the committed rows of a sequence into ``kept``."""
    # Drop the row of an accepted guess that ended the sequence: without a draft it would have none.
    seen = len(sequence.tokens) - 1
    assert isinstance(cache, KVCache)  # that of a transformers model
    own = [(keys[:, :, :seen], values[:, :, :seen]) for keys, values in _layers(cache, slot)]
    cross = _layers(cache.sources, cache.beside[slot]) if isinstance(cache, Seq2SeqCache) else []
    kept[sequence] = Kept(own, cross)


def _layers(cache: KVCache, slot: Slot) -> list[LayerRows]:
    return [cache.rows(layer, slot) for layer in range(len(cache.layers))]


class Engines:
    """Pool of engines for a model, rebuilt when the model changes.

    Args:
        drafter: a drafter or its spec string; None for the usual one of the target.
        verifier: a verifier or its spec string.
        adaptive: as for ``Engine``.
        costs: measured costs from a profile, the initial costs of governors.
        options: those of the target.
        learner: observer of the engine, of which there is then only one: calls wait for each other.

    Raises:
        OutpaceError: options of the target are given with a learner, which has made it.
    """

    def __init__(
        self,
        drafter: Drafter[Any] | str | None,
        verifier: str | Verifier,
        adaptive: Adaptive = "auto",
        costs: Mapping[str, Any] | None = None,
        options: TargetOptions = USUAL,
        learner: Learner | None = None,
    ) -> None:
        if learner is not None and options != USUAL:
            raise OutpaceError(
                "the learner has made the target; give exact, pack, quantise or stock to its Target"
            )
        self.learner = learner
        # Held by a call that borrows an engine, in a `with` statement of its own: an interrupt cannot leave
        # it held, as it could inside a context manager written in Python.
        self.alone: AbstractContextManager[Any] = nullcontext() if learner is None else threading.Lock()
        self.drafter = drafter
        self.verifier = verifier
        self.adaptive = adaptive
        self.costs = costs
        self._options = options
        self._lock = threading.Lock()
        self._target: TargetModel | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._revision = 0  # of the weights that idle engines were made with
        self._changes = options == ONE_CALL  # weights have changed between calls; or there is one alone
        self._usual: Drafter[Any] | None = None  # the usual drafter of the target, once it is known
        self._idle: list[RowEngine] = []

    def target(self, model: Any) -> TargetModel:
        """The model as a target, rebuilt if its device, dtype, attention, head or modules have changed.

        If weights have, the target follows them, and engines are replaced, with what drafters hold of it.

        Raises:
            UnsupportedModel: drafts cannot be verified with it; the message names the reason.
            OutpaceError: a learner was made for another model, or the model has changed since.
        """
        with self._lock:
            state = _state(model, self._options.quantise)
            changed = None if self._target is None else self._target.replaced()
            if self._target is None or self._made_for != state or changed:
                if self.learner is not None:
                    if self._target is not None or self.learner.target.model is not model:
                        raise OutpaceError(_ANOTHER)
                    self._target = self.learner.target
                else:
                    self._idle.clear()
                    known = isinstance(model, PreTrainedModel)  # Target refuses others
                    passed = known and _passed.get(model) == (state, fingerprint(model), self._options)
                    options = replace(self._options, check=False) if passed else self._options
                    self._target, self._usual = _made(model, options, changed), None
                self._warn_if_inexact(self._target)
                self._made_for, _passed[model] = state, (state, fingerprint(model), self._options)
                self._revision = self._target.revision()
            elif (revision := self._target.revision()) != self._revision:
                if self.learner is not None:
                    raise OutpaceError(_ANOTHER)
                self._idle.clear()
                self._revision, self._usual = revision, None
                self._changes = True
            return self._target

    def _warn_if_inexact(self, target: TargetModel) -> None:
        """Warn if drafts may change tokens, since the tokens that generate() returns cannot report it."""
        plain = self.drafter == "none" or isinstance(self.drafter, NoDraft)
        if plain or target.promise != "not exact" or load_verifier(self.verifier).lossy:
            return
        warnings.warn(
            f"{target.name} is not exact here: where its two best tokens nearly tie, drafts may change which "
            f"is emitted ({target.why_inexact}); see docs/concepts/exactness.md",
            UserWarning,
            stacklevel=4,
        )

    @contextmanager
    def lend(self, target: TargetModel) -> Iterator[RowEngine]:
        """Lend an engine for a target of this pool that no other thread uses. Call it under ``alone``.

        Raises:
            OutpaceError: the target, the drafter and the verifier do not fit each other.
        """
        with self._lock:
            revision = self._revision
            engine = self._idle.pop() if self._idle and target is self._target else None
        if engine is None:
            engine = self._engine(target)
        # After an error the engine is dropped, since its state is undefined.
        yield engine
        engine.close()
        with self._lock:
            if target is self._target and revision == self._revision:
                self._idle.append(engine)

    def _engine(self, target: TargetModel) -> RowEngine:
        drafter = self.drafter or self._usual
        if drafter is None:
            drafter = self._usual = usual_drafter(target, self.verifier, self._changes)
        engine = RowEngine(
            target,
            drafter,
            self.verifier,
            adaptive=self.adaptive,
            observer=self.learner,
            slots=1,
            length=1,
            memory=None,
        )
        parts = engine.target, engine.drafter, engine.governor, engine.verifier
        for reason in reasons(*parts) if self._options != ONE_CALL else ():
            tell(f"slower than it could be: {reason}")
        if self.costs and isinstance(engine.governor, Governor):
            engine.governor.begin_with(self.costs)
        return engine
