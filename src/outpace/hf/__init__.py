"""Acceleration of transformers' own generate().

``accelerate(model, drafter)`` sets an attribute on one model, ``decode(drafter)`` works for one call. Both
let transformers prepare the request (configuration, processors, criteria) and replace only the decoding loop.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from outpace.core import USUAL, OutpaceError, TargetOptions
from outpace.drafters import load_drafter
from outpace.drafters.base import Drafter
from outpace.engine.observer import Learner
from outpace.engine.parts import Adaptive, drafter_of
from outpace.engine.profile import load_profile
from outpace.engine.slow import tell
from outpace.hf.checks import NotDecoded, names_adapters, refuse_arguments
from outpace.hf.decoding import Decoder
from outpace.hf.engines import ONE_CALL, Engines
from outpace.targets.inputs.config import CACHE
from outpace.targets.inputs.wrapped import unwrapped
from outpace.verify import Verifier, load_verifier

__all__ = ["accelerate", "decode", "restore"]

Model = TypeVar("Model")
_STEP = ("exact", "plan", "quantise", "stock")  # options that leave a model able to do all else


def accelerate(
    model: Model,
    drafter: str | Drafter[Any] | None = None,
    verifier: str | Verifier = "match",
    adaptive: Adaptive = "auto",
    profile: str | Path | None = None,
    learner: Learner | None = None,
    fallback: bool = False,
    **options: Any,
) -> Model:
    """Make ``model.generate(...)`` faster without changes to its callers, and return the model.

    Greedy tokens are those of plain decoding here, ``accelerate(model, "none")``, as far as
    docs/concepts/exactness.md promises. Those of the stock generate() may differ at near-ties, since plain
    steps round otherwise: in float32 almost never, in half precision in about half of all texts; see
    ``stock``. With ``do_sample`` the seed of each row is drawn from torch's default generator, so
    ``torch.manual_seed`` makes a call repeatable, and the tokens are those of ``accelerate(model, "none")``:
    the stock distribution, but not the stock tokens.

    On a CPU steps use packed copies of the linear layers' weights, so those are in memory twice; but weights
    that ``from_pretrained`` read from a file, and that nobody has written to, are not, where steps are
    native. ``outpace env --model`` counts the copied layers as ``packed``.

    Only this instance is changed: it gets an attribute ``generate``, which ``restore(model)`` deletes. A copy
    (copy.copy, copy.deepcopy, pickle) is a plain model. Accelerating a model again replaces the settings.

    Differences from the stock generate():

    - rows are processed one at a time: a logits processor gets input_ids [1, n], left pads included, and
      scores [1, vocabulary], a stopping criterion input_ids [1, n];
    - ``scores`` and ``logits`` of a row that has ended are zeros, and so are its rows in ``cache``
      (``past_key_values`` before transformers 5.24), a DynamicCache (or two in an EncoderDecoderCache);
    - generation ends at the model's context with a warning, where the stock loop continues; a prompt that
      fills the context is refused;
    - calls that cannot be decoded are refused with the remedy, or with ``fallback`` left to transformers:
      beams, assistants, DoLa, contrastive search, inputs_embeds, a filled cache, output_attentions,
      output_hidden_states, guidance_scale, synced_gpus, Whisper's return_token_timestamps.
      docs/reference/transformers.md lists every argument.

    generate() has no argument for references, so the drafter ``reference`` copies from the prompt, or from an
    encoder's input whose vocabulary is the decoder's.

    Of a model of text and images (Llava, Qwen2-VL, SmolVLM) the prompt's images are read by the model itself;
    its first images test it. Models whose images do more than become embeddings of the prompt are refused.

    Of an encoder-decoder model (T5, BART, Marian, Whisper) the decoder is accelerated; generate() itself runs
    the encoder. Whisper's long-form decoding, with time stamps, fallbacks and detection of silence, calls the
    accelerated decoder for each window.

    Several threads may call generate() at the same time.

    The model may be trained, edited, wrapped or converted between calls: each call looks whether its modules,
    what they keep, or weights have changed, however they were written. Of large weights it compares one
    number in 8,192, so a write that torch does not count (through ``.data`` or NumPy) to a few rows alone may
    be missed: accelerate the model again after it.

    Args:
        model: a loaded transformers model, decoder-only, with images or without, or encoder-decoder; one of
            PEFT, whose adapters may be switched, merged and trained between calls.
        drafter: a drafter or its spec string; "none" decodes plainly. By default "suffix:memory=0",
            which keeps nothing of a call for later ones, with what the model's folder brings to draft with
            (docs/reference/methods.md), or on a CPU with "self" where a trial says that it pays
            (docs/concepts/rounded-self.md; the first call then rounds weights, for seconds); as chains
            (branches=1) for a model or a verifier that takes only those (BLOOM, MPT;
            docs/reference/models.md).
        verifier: a verifier or its spec string: "match" (the tokens of plain decoding), "rejection"
            (their distribution), or one of another package.
        adaptive: whether a governor decides, from measured times, how much each step drafts, nothing if
            nothing pays; or a policy. "auto": if the verifier is "match". Under another verifier the rows'
            seeds would not make a call repeatable, so True refuses sampling there.
        profile: a file written by ``outpace tune``, which names the drafter in place of ``drafter``. It was
            the fastest for calls with as many rows as the ``--batch`` it was tuned with.
        learner: a ``Learner`` made with this model, as ``Online`` of outpace-lab: its drafter is used, and
            learns from all calls, which then wait for each other.
        fallback: let transformers' own generate() decode the calls that outpace refuses, after a warning that
            names the argument. Its steps are the stock ones.
        options: exact, plan, quantise, stock and static=False, as for ``TargetOptions``. exact=True:
            even in half precision no near-tie differs from ``accelerate(model, "none")``. quantise="int8":
            the tokens are those of ``accelerate(model, "none", quantise="int8")``, and
            not those of the stock generate(). stock=True: with drafter "none" a prompt alone has the tokens
            of the stock generate(), as with stock=True in docs/concepts/exactness.md; with drafts near-ties
            may differ in half precision.
            Slower.

    Warns:
        UserWarning: the verifier is lossy, or drafts may change tokens of this model; at a call that
            transformers decodes.

    Raises:
        UnsupportedModel: outpace cannot verify drafts with this model; the message names the reason.
        OutpaceError: an unknown drafter or verifier, or parts that do not fit together; a profile of another
            model, dtype or machine; or ``generate`` of this instance has been replaced by other code.
    """
    costs: Mapping[str, Any] = {}
    chosen = TargetOptions.of(options, "accelerate()", inspect.signature(accelerate).parameters)
    drafter_of(drafter), load_verifier(verifier)  # refuses unknown ones before anything is measured
    inner = _inner(model, "accelerate()")
    others = [name for name in options if name not in _STEP]
    names = [name for name in others if getattr(chosen, name) != getattr(USUAL, name)]
    if names and not (names == ["static"] and chosen.static is False):
        raise OutpaceError(f"{names[0]} is for outpace.Target, not for a model's generate(): leave it out")
    if profile is not None:
        if drafter is not None:
            raise OutpaceError("give a drafter or a profile, not both: the profile names its drafter")
        alone = Engines("none", "match", options=chosen)
        known = load_profile(profile, alone.target(inner))
        drafter, costs = known.drafter, known.costs
    spec: str | Drafter[Any] | None = drafter
    if learner is not None:
        if drafter is not None or profile is not None:
            raise OutpaceError("give a learner, or a drafter or profile: a learner has its own drafter")
        spec = learner.drafter
    engines = Engines(spec, verifier, adaptive, costs, chosen, learner)
    with engines.alone, engines.lend(engines.target(inner)):  # refuses mismatched parts now
        pass
    _refuse_foreign(inner)
    _warn_if_lossy(verifier)
    if inner.dtype in (torch.bfloat16, torch.float16) and not chosen.stock:
        short = str(inner.dtype).removeprefix("torch.")
        tell(
            f"steps in {short} round otherwise than transformers' own: texts are those of plain decoding "
            "here, and differ at near-ties from the stock generate(); for its texts, without drafts, "
            "give stock=True (docs/concepts/exactness.md)"
        )
    restore(inner)
    attributes = vars(inner)
    attributes["generate"] = Generate(inner, engines, fallback)
    # Copying and pickling ask the instance for its state, so this hides both attributes from copies.
    attributes["__getstate__"] = functools.partial(_plain_state, weakref.ref(inner))
    return model


def _inner(model: Any, what: str) -> Any:
    """The transformers model to change."""
    if model is None or isinstance(model, str | Path):
        loaded = "AutoModelForCausalLM.from_pretrained(...)"
        asked = f", and outpace.load({str(model)!r}) one that answers" if model is not None else ""
        raise OutpaceError(
            f"{what} takes a loaded model, not {model!r}; transformers' {loaded} makes one{asked}"
        )
    return unwrapped(model)


def restore(model: Model) -> Model:
    """Undo ``accelerate`` and return the model. A model that is not accelerated is returned unchanged."""
    attributes = vars(_inner(model, "restore()"))
    if isinstance(attributes.get("generate"), Generate):
        del attributes["generate"]
        attributes.pop("__getstate__", None)
    return model


def decode(
    drafter: str | Drafter[Any] | None = None,
    verifier: str | Verifier = "match",
    adaptive: Adaptive = "auto",
) -> Callable[..., Any]:
    """A callable for one call: ``model.generate(..., custom_generate=outpace.decode("lookahead"))``.

    Equivalent to ``accelerate``, except for streamers and stop strings: transformers passes neither
    ``streamer`` nor ``tokenizer`` to a callable. A streamer would receive only the prompt, not even the end,
    and ``stop_strings`` and ``token_healing`` fail without a tokenizer. ``assistant_model`` and
    ``synced_gpus`` are not passed either, and therefore ignored. Use ``accelerate`` for any of these. Each
    call makes an engine, which costs a forward over one token and, once per model, a self-test;
    ``accelerate`` keeps its engine, packs weights and tests for bit-exactness, which does not pay for a
    single call.

    Args:
        drafter: a drafter or its spec string; "none" decodes plainly. By default as for ``accelerate``, but
            without what is first loaded or rounded.
        verifier: a verifier or its spec string: "match" (the tokens of plain decoding), "rejection"
            (their distribution), or one of another package.
        adaptive: as for ``accelerate``, but measurements are forgotten after the call, and so are the earlier
            outputs remembered by ``suffix``.

    Warns:
        UserWarning: the verifier is lossy; at the call, drafts may change tokens of this model.

    Raises:
        OutpaceError: an unknown drafter or verifier.
    """
    _warn_if_lossy(verifier)
    if isinstance(drafter, str):
        load_drafter(drafter)

    def custom_generate(
        model: Any, input_ids: Tensor, inputs_tensor: Tensor | None = None, **prepared: Any
    ) -> Any:
        # Engines for this call alone: keeping the callable must not keep a model alive.
        decoder = Decoder(Engines(drafter, verifier, adaptive, options=ONE_CALL))
        try:
            return decoder(model, input_ids, inputs_tensor=inputs_tensor, **prepared)
        except NotDecoded as error:
            raise NotDecoded(error.what, error.remedy, "without custom_generate") from None

    return custom_generate


def _warn_if_lossy(verifier: str | Verifier) -> None:
    """Warn about a lossy verifier: generate() returns tokens only, so its result cannot report it."""
    chosen = load_verifier(verifier)
    if chosen.lossy:
        warnings.warn(
            f"the verifier {chosen} changes the model's output; match, rejection and block do not",
            UserWarning,
            stacklevel=3,
        )


class Generate:
    """The attribute ``generate`` of an accelerated model; called like the method that it replaces."""

    def __init__(self, model: Any, engines: Engines, fallback: bool = False) -> None:
        self._model = weakref.ref(model)
        self._engines = engines
        self._fallback = fallback
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
        why = "adapter_names, an adapter for each row; set_adapter() sets one for all" * names_adapters(model)
        # Also without a fallback: PEFT does not take its hooks back after an error.
        if not why and not self._fallback:
            return self._accelerated(method, model, dict(arguments))
        if not why:
            try:
                return self._accelerated(method, model, dict(arguments), _Held())
            except NotDecoded as error:
                why = f"{error.what}; {error.remedy}"
        told = f"transformers decodes this call: outpace does not decode with {why}"
        warnings.warn(told, UserWarning, stacklevel=2)
        return method(model, **arguments)

    def _accelerated(
        self, method: Any, model: Any, arguments: dict[str, Any], held: _Held | None = None
    ) -> Any:
        """The call with outpace's decoding loop.

        Args:
            held: receives the prompt in the streamer's place, until it is certain that the call is decoded.
        """
        refuse_arguments(arguments)
        healer = _take_healing(model, arguments)
        _take_stop_strings(model, arguments)
        if (cache := arguments.get(CACHE, arguments.get("past_key_values"))) is not None:
            cache._is_user_defined = True  # makes transformers fill an empty one, as newer versions do
        streamer = arguments.get("streamer")
        if streamer is None or held is None:
            held = None
        elif healer is None:
            arguments["streamer"] = held
        arguments["custom_generate"] = Decoder(self._engines, streamer, healer, () if held is None else held)
        if healer is not None:
            arguments["streamer"] = None  # it gets the healed prompt, from the decoder
        try:
            # The streamer is passed along: transformers puts only the prompt into it.
            return method(model, **arguments)
        except BaseException as error:
            if streamer is not None and not (held is not None and isinstance(error, NotDecoded)):
                streamer.end()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled like a bound method: a copy of the model is plain, and so is its generate().
        return getattr, (self._model(), "generate")


class _Held(list[Tensor]):
    """A streamer that keeps what is put into it."""

    def put(self, value: Tensor) -> None:
        self.append(value)

    def end(self) -> None:
        pass


def _refuse_foreign(model: Any) -> None:
    """Refuse a model whose ``generate`` or ``__getstate__`` has been replaced by other code."""
    ours = isinstance(vars(model).get("generate"), Generate)
    for name in ("generate", "__getstate__"):
        if name in vars(model) and not ours:
            raise OutpaceError(f"this model has an attribute {name!r} of its own; delete it first")


def _plain_state(reference: Any) -> dict[str, Any]:
    """The state of an accelerated model for a copy, without acceleration."""
    model = reference()
    method = getattr(type(model), "__getstate__", None)  # every object has one from Python 3.11 on
    state = dict(vars(model) if method is None else method(model))
    state.pop("generate", None)
    state.pop("__getstate__", None)
    return state


def _by_name(method: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    arguments = dict(list(bound.arguments.items())[1:])
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _take_healing(model: Any, arguments: dict[str, Any]) -> Any:
    """The tokenizer for token healing, which is then left to the decoder; None if there is nothing to heal.

    generate() would look for a tokenizer that it does not pass on.
    """
    config: Any = arguments.get("generation_config")
    wanted = arguments.get("token_healing")
    for own in (config, model.generation_config):
        wanted = getattr(own, "token_healing", None) if wanted is None else wanted
    tokenizer = arguments.get("tokenizer")
    if not wanted or tokenizer is None:
        return None  # without a tokenizer generate() raises its own error
    if config is None or "token_healing" in arguments:
        arguments["token_healing"] = False
    else:
        arguments["generation_config"] = config = copy.copy(config)
        config.token_healing = False
    return tokenizer


def _take_stop_strings(model: Any, arguments: dict[str, Any]) -> None:
    """Turn stop strings into a criterion: generate() would look for a tokenizer that it does not pass on."""
    config: Any = arguments.get("generation_config")
    given = getattr(config, "stop_strings", None)
    strings = arguments.get("stop_strings", given or model.generation_config.stop_strings)
    tokenizer = arguments.get("tokenizer")
    if strings is None or tokenizer is None:
        return  # without a tokenizer generate() raises its own error
    if given is not None:
        arguments["generation_config"] = config = copy.copy(config)
        config.stop_strings = None
    if "stop_strings" in arguments or model.generation_config.stop_strings is not None:
        arguments["stop_strings"] = None
    criteria = list(arguments.get("stopping_criteria") or ())
    # As in transformers, the caller's own criterion replaces the one made here.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.insert(0, StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    arguments["stopping_criteria"] = StoppingCriteriaList(criteria)
