"""A loaded model: a target with its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any

import torch

from outpace.core import (
    USUAL,
    ContextOverflow,
    Generation,
    OutpaceError,
    SamplingParams,
    StreamedToken,
    TargetOptions,
    UnsupportedModel,
)
from outpace.drafters.base import Drafter
from outpace.engine.engine import Engine
from outpace.engine.observer import Observer
from outpace.engine.parts import Adaptive
from outpace.engine.request import Prompt, prompts_of
from outpace.engine.usual import usual_drafter
from outpace.loading.images import ImageProcessor, images_of
from outpace.loading.placement import Spread, device_of, dtype_of
from outpace.loading.sampling import params_of, sampling_of_chat
from outpace.loading.weights import Encoders, load_weights, own_dtype, reads_rounded
from outpace.names import source_of
from outpace.policy.governor import Governor
from outpace.reading import Messages, chat_ids, has_template, render, token_ids
from outpace.targets import Target, TargetModel
from outpace.verify import Verifier

_TEMPLATE_OWN = {"messages", "additional_special_tokens", "self", "caller"}  # given by renderers


@dataclass(frozen=True)
class Loaded:
    """A model that passed the target's self-test, with its tokenizer and chat template.

    Attributes:
        name: the hub name or folder as the user gave it, for messages and reports.
        target: the model as the engine's target.
        tokenizer: transformers' tokenizer.
        dtype, device: in torch's notation, e.g. "bfloat16" and "cuda:0".
        source: the folder or hub name from which another process can load the model; "" if there is none.
        costs: measured costs from a profile, the initial costs of governors.
        images: the processor of a model that reads images, if it was loaded for them.
        no_images: why the model takes none.
    """

    name: str
    target: TargetModel
    tokenizer: Any
    dtype: str
    device: str
    source: str = ""
    costs: Mapping[str, Any] = field(default_factory=dict)
    images: ImageProcessor | None = None
    no_images: str = "it is a model of text"

    def __str__(self) -> str:
        quantised = f", weights in {self.target.quantised}" if self.target.quantised else ""
        return f"{self.name}, {self.dtype}{quantised} on {self.device}"

    def engine(
        self,
        drafter: Drafter[Any] | str | None = None,
        verifier: Verifier | str = "match",
        slots: int = 1,
        adaptive: Adaptive = "auto",
        observer: Observer | None = None,
        **more: Any,
    ) -> Engine:
        """A new engine on this model; the arguments are those of ``Engine``."""
        parts = self.target, drafter, verifier, self.tokenizer
        engine = Engine(*parts, adaptive=adaptive, observer=observer, slots=slots, **more)
        if self.costs and isinstance(engine.governor, Governor):
            engine.governor.begin_with(self.costs)
        return engine

    @cached_property
    def _engine(self) -> Engine:
        """The engine of ``generate``, ``stream`` and ``chat``, for the thread that calls one first."""
        return self.engine(usual_drafter(self.target))

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> list[Generation]:
        """Decode prompts together, as ``Engine.generate`` does; greedy by default.

        Args:
            prompts: one text, one conversation, or a list of prompts: texts, conversations or token ids.
            params: for all prompts, or one per prompt.
            raw: continue a text as it stands; otherwise it is a user's turn in the model's chat template, if
                the model has one.
            sampling: fields of ``SamplingParams``, in place of ``params``, as in ``max_tokens=200``.
        """
        asked = self._in_turns(prompts_of(prompts), raw)
        return self._engine.generate(asked, params_of(params, sampling))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False, **sampling: Any
    ) -> Iterator[StreamedToken]:
        """Yield the tokens of one prompt as they are emitted; the arguments are those of ``generate``."""
        (asked,) = self._in_turns([prompt], raw)
        return self._engine.stream(asked, params_of(params, sampling))

    def chat(
        self, messages: str | Messages, params: SamplingParams | None = None, **sampling: Any
    ) -> Generation:
        """Answer a conversation, with the sampling of the model's own generation config if it has some.

        Args:
            messages: dicts with "role" and "content", or the text of a user's only message.
            params: in place of the model's own.
            sampling: fields of ``SamplingParams``, before the model's own.

        Raises:
            OutpaceError: the model has no chat template.
        """
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        chosen = params_of(params, sampling) if params else sampling_of_chat(self.target, sampling)
        if chosen.n != 1:
            raise OutpaceError(
                f"n={chosen.n}: chat() returns one answer; generate([messages], n={chosen.n}) several"
            )
        return self._engine.generate([turns], chosen)[0]

    def _in_turns(self, prompts: Seq[Prompt], raw: bool) -> list[Prompt]:
        """The prompts, each text as a user's turn if it is to be one."""
        if raw or not self.has_template:
            return list(prompts)
        return [[{"role": "user", "content": one}] if isinstance(one, str) else one for one in prompts]

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return has_template(self.tokenizer)

    @cached_property
    def template_options(self) -> frozenset[str]:
        """Variables that the chat template reads, besides conversation, tools and special tokens."""
        from jinja2 import meta  # optional, as the template's renderer in transformers
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        given = getattr(self.tokenizer, "chat_template", None) or {}
        found = set[str]()
        for template in given.values() if isinstance(given, Mapping) else [given]:
            environment = _compile_jinja_template(template).environment
            found |= meta.find_undeclared_variables(environment.parse(template)) - set(environment.globals)
        taken = {name for name in found if name.endswith("_token")} | _TEMPLATE_OWN
        for renderer in (self.tokenizer.apply_chat_template, render_jinja_template):
            taken |= set(signature(renderer).parameters) - {"documents"}
        return frozenset(found - taken)

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text of any length, with the tokenizer's special tokens at its ends.

        Raises:
            OutpaceError: the text contains an unpaired surrogate.
        """
        return token_ids(self.tokenizer, text)

    def plain_tokens(self, text: str) -> list[int]:
        """Token ids of a part of a text: without special tokens at its ends.

        Raises:
            OutpaceError: as ``tokens``.
        """
        return token_ids(self.tokenizer, text, special=False)

    def encode(self, text: str, chat: bool = False) -> list[int]:
        """Token ids of a prompt.

        Args:
            chat: whether the text is a user's turn, to be put into the chat template.

        Raises:
            OutpaceError: the prompt has no tokens or exceeds the context, or there is no chat template.
        """
        context = None if self.target.has_encoder else self.target.context
        if chat:
            text = self.render([{"role": "user", "content": text}])
        ids = token_ids(self.tokenizer, text, special=not chat, most=context)
        if not ids:
            raise OutpaceError("the prompt is empty: it has no tokens")
        if context is not None and len(ids) > context:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, the model's context {context}; shorten the prompt"
            )
        return ids

    def encode_chat(self, messages: Messages, **options: Any) -> list[int]:
        """Token ids of a conversation of any length, up to where the answer begins.

        Args:
            messages, options: as for ``render``.

        Raises:
            OutpaceError: as ``render`` and ``tokens``.
        """
        return chat_ids(self.tokenizer, self.name, messages, **options)

    def render(self, messages: Messages, **options: Any) -> str:
        """A conversation in the model's chat template, up to where the answer begins.

        Args:
            messages, options: as for ``reading.render``.

        Raises:
            OutpaceError: there is no chat template, or it rejects the messages.
        """
        return render(self.tokenizer, self.name, messages, **options)


def load_here(
    name: str | None,
    dtype: str,
    place: str | Spread | None,
    trust_remote_code: bool,
    seq2seq: Encoders = False,
    options: TargetOptions = USUAL,
) -> Loaded:
    """A transformers model on the devices of this process; the arguments are those of ``outpace.load``."""

    def on(device: torch.device | None, dtype: torch.dtype | str, **more: Any) -> Loaded:
        rounded = device is not None and device.type == "cpu"

        def target_of(model: Any) -> TargetModel:
            return Target(model if device is None else model.to(device), **vars(options))

        asked = name, dtype, trust_remote_code, seq2seq, rounded
        shown, target, tokenizer = load_weights(*asked, target_of, **more)
        loaded = _made(shown, target, tokenizer, source_of(name))
        return _seeing(loaded, trust_remote_code) if seq2seq == "images" else loaded

    if isinstance(place, Spread):
        return on(None, dtype_of(dtype, place.devices[0]), device_map=place.layers)
    device = device_of(place)
    own = own_dtype(name, trust_remote_code)
    if dtype == "auto" and device.type == "cpu" and reads_rounded(name, trust_remote_code):
        return on(device, "auto")
    if dtype != "auto" or device.type != "cpu":
        return _because(on(device, dtype_of(dtype, device)), "", own)
    first, why = dtype_of(dtype, device, own), ""
    if first == torch.bfloat16:
        try:
            found = on(device, first)
            if found.target.bit_exact:
                return _because(found, "bfloat16, the model's own", own)
            why = found.target.why_inexact or ""
            del found  # its memory is needed
        except UnsupportedModel as error:
            why = str(error)
        why = f"float32, since steps in bfloat16, the model's own, are not bit-exact: {why}"
    return _because(on(device, torch.float32), why, own)


def _seeing(loaded: Loaded, trust_remote_code: bool) -> Loaded:
    """A model with its processor of images, or with the reason why it takes none."""
    try:
        images = images_of(loaded.source, loaded.target, loaded.tokenizer, trust_remote_code)
    except OutpaceError as error:
        return replace(loaded, no_images=str(error))
    return replace(loaded, images=images)


def _because(loaded: Loaded, why: str, own: torch.dtype | None) -> Loaded:
    """Report in the target's plan which dtype was chosen, and why, and the model's own."""
    named = "" if own is None else str(own).removeprefix("torch.")
    loaded.target.plan = replace(loaded.target.plan, dtype=why, own_dtype=named)
    return loaded


def made(name: str, model: Any, tokenizer: Any, source: str = "", options: TargetOptions = USUAL) -> Loaded:
    """Wrap a transformers model that is in memory.

    Args:
        name, tokenizer, source: fields of ``Loaded``.
        options: options of its target.
    """
    return _made(name, Target(model, **vars(options)), tokenizer, source)


def _made(name: str, target: TargetModel, tokenizer: Any, source: str) -> Loaded:
    dtype = str(target.dtype).removeprefix("torch.")
    return Loaded(name, target, tokenizer, dtype, str(target.model.device), source)
