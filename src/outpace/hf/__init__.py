"""transformers' own generate(), decoded by outpace.

``accelerate(model, drafter)`` puts an attribute on one model, ``decode(drafter)`` works for one call. Both
let transformers prepare the request (configuration, processors, criteria) and replace the loop alone.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.engine.parts import Adaptive
from outpace.engine.profile import load_profile
from outpace.hf.checks import refuse_arguments
from outpace.hf.decoding import Decoder
from outpace.hf.engines import Engines
from outpace.verify import Verifier, load_verifier

__all__ = ["accelerate", "decode", "restore"]

Model = TypeVar("Model")


def accelerate(
    model: Model,
    drafter: str | Drafter[Any] | None = None,
    verifier: str | Verifier = "match",
    adaptive: Adaptive = "auto",
    profile: str | Path | None = None,
) -> Model:
    """Make ``model.generate(...)`` faster, with no change where it is called, and return the model.

    Greedy tokens are those of the stock generate(). With ``do_sample`` the seed of each row is drawn from
    torch's default generator, so ``torch.manual_seed`` repeats a call, and the tokens are those of
    ``accelerate(model, "none")``: the stock distribution, but not the stock tokens.

    Only this instance is touched: it gets an attribute ``generate``, which ``restore(model)`` deletes. A copy
    (copy.copy, copy.deepcopy, pickle) is a plain model. Accelerating again replaces.

    What differs from the stock generate():

    - rows are processed one at a time: a logits processor sees input_ids [1, n], its left pads included, and
      scores [1, vocabulary], a stopping criterion input_ids [1, n];
    - ``scores`` and ``logits`` of a row that has ended are zeros, and so are its rows in ``past_key_values``,
      always a DynamicCache;
    - generation ends at the model's context, with a warning, where stock goes on; a prompt that fills the
      context is refused;
    - what cannot be decoded is refused with the remedy: beams, assistant_model, prompt_lookup_num_tokens,
      DoLa, contrastive search, inputs_embeds, a filled past_key_values, output_attentions,
      output_hidden_states, guidance_scale, synced_gpus.

    generate() has no argument for references: the drafter ``reference`` copies from the prompt then.

    Threads may call generate() at the same time.

    Args:
        model: a loaded decoder-only transformers model.
        drafter: a drafter or its spec string; "none" decodes plainly. By default "lookahead".
        verifier: a verifier or its spec string: "match" (the tokens of plain decoding), "rejection" or
            "block" (their distribution), or a lossy one.
        adaptive: whether a governor decides, from measured times, how much each step drafts, nothing where
            nothing pays; or a policy. "auto": where the verifier is "match". Under another verifier the rows'
            seeds would not repeat a call, so True refuses sampling there.
        profile: a file that ``outpace tune`` wrote, which names the drafter in place of ``drafter``. It is
            the fastest for calls of as many rows as ``--batch`` had there.

    Warns:
        UserWarning: the verifier is lossy.

    Raises:
        UnsupportedModel: outpace cannot verify drafts with this model; the message names the reason.
        OutpaceError: unknown drafter or verifier, or parts that do not fit; no profile of this model, dtype
            and machine; or ``generate`` of this instance was replaced by someone else.
    """
    if profile is not None:
        if drafter is not None:
            raise OutpaceError("give a drafter or a profile, not both: a profile names a drafter")
        drafter = load_profile(profile, Engines("none", "match").target(model)).drafter
    engines = Engines("lookahead" if drafter is None else drafter, verifier, adaptive)
    with engines.lend(engines.target(model)):  # what does not fit is said now, not at the first call
        pass
    _refuse_foreign(model)
    _warn_if_lossy(verifier)
    restore(model)
    attributes = vars(model)
    attributes["generate"] = Generate(model, engines)
    # Copying and pickling ask the instance for its state, so this hides both attributes from copies.
    attributes["__getstate__"] = functools.partial(_plain_state, weakref.ref(model))
    return model


def restore(model: Model) -> Model:
    """Undo ``accelerate``, and return the model. A model that is not accelerated is left as it is."""
    if isinstance(vars(model).get("generate"), Generate):
        del vars(model)["generate"]
        del vars(model)["__getstate__"]
    return model


def decode(
    drafter: str | Drafter[Any] = "lookahead",
    verifier: str | Verifier = "match",
    adaptive: Adaptive = "auto",
) -> Callable[..., Any]:
    """A callable for one call: ``model.generate(..., custom_generate=outpace.decode("lookahead"))``.

    It does what ``accelerate`` does, less streamers and stop strings: transformers hands neither ``streamer``
    nor ``tokenizer`` to a callable. A streamer would get the prompt and then nothing, not even its end, and
    ``stop_strings`` fails for want of a tokenizer. ``assistant_model`` and ``synced_gpus`` are not handed
    over either; they are ignored. Use ``accelerate`` for any of these. An engine is made for each call, which
    costs a forward over one token, and once for each model a self-test; ``accelerate`` keeps its engine.

    Args:
        drafter: a drafter or its spec string; "none" decodes plainly.
        verifier: a verifier or its spec string: "match" (the tokens of plain decoding), "rejection" or
            "block" (their distribution), or a lossy one.
        adaptive: as for ``accelerate``; what was measured is forgotten with the call. So is what ``suffix``
            remembers of earlier outputs.

    Warns:
        UserWarning: the verifier is lossy.

    Raises:
        OutpaceError: unknown drafter or verifier.
    """
    _warn_if_lossy(verifier)
    if isinstance(drafter, str):
        load_drafter(drafter)

    def custom_generate(model: Any, input_ids: Tensor, **prepared: Any) -> Any:
        # Engines of this call alone: whoever keeps the callable does not keep a model alive with it.
        return Decoder(Engines(drafter, verifier, adaptive))(model, input_ids, **prepared)

    return custom_generate


def _warn_if_lossy(verifier: str | Verifier) -> None:
    """Tokens are all that generate() returns, so that nothing in its result could say it.

    Raises:
        OutpaceError: unknown verifier.
    """
    chosen = load_verifier(verifier)
    if chosen.lossy:
        warnings.warn(
            f"the verifier {chosen} changes what the model says; match, rejection and block do not",
            UserWarning,
            stacklevel=3,
        )


class Generate:
    """The attribute ``generate`` of an accelerated model; called as the method it stands for."""

    def __init__(self, model: Any, engines: Engines) -> None:
        self._model = weakref.ref(model)
        self._engines = engines
        method = type(model).generate
        self.__doc__ = method.__doc__
        self.__signature__ = inspect.signature(functools.partial(method, model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The class's own generate(), with outpace's decoding loop."""
        model: Any = self._model()
        method = type(model).generate
        arguments = _by_name(method, model, args, kwargs)
        if arguments.get("custom_generate") is not None:
            return method(model, **arguments)
        refuse_arguments(arguments)
        _take_stop_strings(model, arguments)
        if (cache := arguments.get("past_key_values")) is not None:
            cache._is_user_defined = True  # so that an empty one is filled, as newer transformers do
        streamer = arguments.get("streamer")
        arguments["custom_generate"] = Decoder(self._engines, streamer)
        try:
            # The streamer goes along: transformers puts the prompt into it, and no more.
            return method(model, **arguments)
        finally:
            if streamer is not None:
                streamer.end()

    def __reduce__(self) -> tuple[Any, ...]:
        # As a bound method; the copy of the model is plain, and so is this.
        return getattr, (self._model(), "generate")


def _refuse_foreign(model: Any) -> None:
    """Refuse a model whose ``generate`` or state somebody else has replaced."""
    ours = isinstance(vars(model).get("generate"), Generate)
    for name in ("generate", "__getstate__"):
        if name in vars(model) and not ours:
            raise OutpaceError(f"this model has an attribute {name!r} of its own; delete it first")


def _plain_state(reference: Any) -> dict[str, Any]:
    """The state that a copy of an accelerated model gets."""
    model = reference()
    method = getattr(type(model), "__getstate__", None)  # every object has one from Python 3.11 on
    state = dict(vars(model) if method is None else method(model))
    state.pop("generate", None)
    state.pop("__getstate__", None)
    return state


def _by_name(method: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names."""
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    arguments = dict(list(bound.arguments.items())[1:])
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
    """Turn stop strings into a criterion: generate() would look for the tokenizer it does not hand over."""
    config: Any = arguments.get("generation_config")
    given = getattr(config, "stop_strings", None)
    strings = arguments.get("stop_strings", given or model.generation_config.stop_strings)
    tokenizer = arguments.get("tokenizer")
    if strings is None or tokenizer is None:
        return  # without a tokenizer generate() says what is missing
    if given is not None:
        arguments["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    if "stop_strings" in arguments or model.generation_config.stop_strings is not None:
        arguments["stop_strings"] = None
    criteria = list(arguments.get("stopping_criteria") or ())
    # As in transformers, a criterion of the caller's own goes before one made here.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.insert(0, StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
