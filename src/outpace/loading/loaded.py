"""A loaded model: a target with its tokenizer and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any

import torch

from outpace.core import USUAL, ContextOverflow, OutpaceError, TargetOptions, UnsupportedModel
from outpace.drafters.base import Drafter
from outpace.engine.engine import Engine
from outpace.engine.observer import Observer
from outpace.engine.parts import Adaptive
from outpace.loading.images import Images, images_of
from outpace.loading.placement import Spread, device_of, dtype_of
from outpace.loading.weights import Encoders, load_weights, own_dtype, reads_rounded
from outpace.names import source_of
from outpace.policy.governor import Governor
from outpace.reading import render, token_ids
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
    images: Images | None = None
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

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

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

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation of any length, up to where the answer begins.

        Args:
            messages, options: as for ``render``.

        Raises:
            OutpaceError: as ``render`` and ``tokens``.
        """
        return self.plain_tokens(self.render(messages, **options))

    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        """A conversation in the model's chat template, up to where the answer begins.

        Args:
            messages: dicts with "role" and "content".
            options: passed to the template, such as ``tools`` or ``add_generation_prompt=False``.

        Raises:
            OutpaceError: there is no chat template, or it rejects the messages.
        """
        if not self.has_template:
            raise OutpaceError(f"{self.name} has no chat template; leave --chat out")
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
        shown, model, tokenizer = load_weights(name, dtype, trust_remote_code, seq2seq, rounded, **more)
        placed = model if device is None else model.to(device)
        loaded = made(shown, placed, tokenizer, source_of(name), options)
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
            why = found.target.inexact
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
    dtype = str(model.dtype).removeprefix("torch.")
    return Loaded(name, Target(model, **vars(options)), tokenizer, dtype, str(model.device), source)
