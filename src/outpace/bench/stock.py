"""transformers' own generate() as a method of the benchmark, in this process, on the same weights."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from outpace.bench.runs import Method, MethodRun, PromptBatch
from outpace.core import OutpaceError, first_line
from outpace.names import STOCK, TRANSFORMERS, check_method

_NO_TOKEN = -1
LOOKUP_TOKENS = 10


class StockMethod(Method):
    """transformers' plain decoding, its prompt lookup, or its assisted generation.

    The model's generation settings are replaced during a run, so that only the request's apply.

    Args:
        kind: one of ``outpace.names.STOCK``.
        assistant: the draft model of assisted generation.
        start: what the decoder of an encoder-decoder model starts with; otherwise empty.

    Raises:
        OutpaceError: unknown kind, or assisted generation without an assistant.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kind: str,
        assistant: PreTrainedModel | None = None,
        temperature: float = 0.0,
        start: Sequence[int] = (),
    ) -> None:
        check_method(TRANSFORMERS, kind, STOCK)
        if kind == "assisted" and assistant is None:
            raise OutpaceError(
                "transformers' assisted generation needs a draft model: add --assistant MODEL, or name the "
                "others, --peers transformers:plain,transformers:prompt_lookup"
            )
        super().__init__(f"transformers:{kind}", promised=temperature == 0)  # sampled, it draws other noise
        self.lone = kind != "plain"
        self._model: Any = model
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "prompt_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
            "assisted": {"assistant_model": assistant},
        }
        self._options = options[kind]
        self._start = list(start)
        # Older transformers search drafted tokens for an end token even if there is none.
        self._never = _NO_TOKEN if kind == "prompt_lookup" else None

    def run(self, request: PromptBatch) -> MethodRun:
        prompts, model = [list(prompt) for prompt in request.prompts], self._model
        width = max(map(len, prompts))
        rows = [(prompt, [0] * (width - len(prompt))) for prompt in prompts]
        ids = torch.tensor([self._joined(pads, prompt) for prompt, pads in rows], device=model.device)
        real = [self._joined(pads, [1] * len(prompt)) for prompt, pads in rows]
        mask = torch.tensor(real, device=model.device)
        more = dict(self._options)
        if self._start:
            width = len(self._start)
            more["decoder_input_ids"] = torch.tensor([self._start] * len(prompts), device=model.device)
        torch.manual_seed(request.seeds[0] % 2**63)
        watch = _Watch()
        with _settings(model, _config(request, model, self._never)), _watched(model, watch):
            watch.begin()
            found = model.generate(ids, attention_mask=mask, streamer=watch, **more)
            seconds = watch.now()
        outputs = _cut(found[:, width:].tolist(), request, model)
        return watch.run(outputs, seconds, width)

    def _joined(self, pads: list[int], prompt: list[int]) -> list[int]:
        """A row of a batch: pads go before a prompt, but after a source, whose encoder counts positions."""
        return prompt + pads if self._start else pads + prompt


class _Watch(BaseStreamer):
    """Recorder of forwards and their rows, and of each step's tokens."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # per forward and sequence
        self._given: list[int] = []  # tokens per step
        self._moments: list[float] = []  # their arrival times
        self._forward_began = 0.0
        self._forward_seconds: list[float] = []
        self._timed = not torch.cuda.is_available()  # on a GPU a forward returns before it is done

    def begin(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the beginning, after waiting for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def put(self, value: torch.Tensor) -> None:
        if not self._rows:
            return  # the prompt
        self._given.append(value.numel())
        self._moments.append(time.perf_counter() - self._began)

    def end(self) -> None:
        pass

    def before(self, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("decoder_input_ids", kwargs.get("input_ids", args[0] if args else None))
        self._rows.append(ids.shape[1] if ids is not None else 1)
        self._forward_began = time.perf_counter()

    def after(self, module: object, args: tuple[Any, ...], output: object) -> None:
        self._forward_seconds.append(time.perf_counter() - self._forward_began)

    def run(self, outputs: list[list[int]], seconds: float, prompt: int) -> MethodRun:
        """Summarise the run."""
        batch, forwards = len(outputs), len(self._rows)
        lone = batch == 1
        given = self._given
        accepted = [tokens - 1 for tokens in given] if lone else []
        each = [
            moment
            for moment, tokens in zip(self._moments, given, strict=True)
            for _ in range(tokens if lone else 1)
        ]
        return MethodRun(
            outputs=outputs,
            seconds=seconds,
            first_seconds=self._moments[0] if given else 0.0,
            first_tokens=given[0] if given else 0,
            forwards=forwards,
            steps=forwards if lone else sum(map(len, outputs)),
            drafted=self._rows[0] - prompt + sum(rows - 1 for rows in self._rows[1:]) if lone else 0,
            accepted=sum(accepted),
            accepted_at=[sum(one > depth for one in accepted) for depth in range(max(accepted, default=0))],
            verify_seconds=sum(self._forward_seconds[1:]) if self._timed else None,
            token_seconds=[each[: len(output)] for output in outputs],
        )


def _config(request: PromptBatch, model: Any, never: int | None) -> GenerationConfig:
    ends = model.generation_config.eos_token_id if request.ends else never
    sampling = {"temperature": request.temperature, "top_k": 0, "top_p": request.top_p}
    return GenerationConfig(
        max_new_tokens=request.max_new_tokens,
        do_sample=request.temperature > 0,
        eos_token_id=ends,
        pad_token_id=0,
        bos_token_id=model.generation_config.bos_token_id,
        decoder_start_token_id=model.generation_config.decoder_start_token_id,
        **(sampling if request.temperature else {}),
    )


def _cut(outputs: list[list[int]], request: PromptBatch, model: Any) -> list[list[int]]:
    """Remove padding: keep each answer up to its first end token, if end tokens end answers."""
    if not request.ends:
        return outputs
    ends = model.generation_config.eos_token_id
    known = set(ends if isinstance(ends, list) else [ends])
    return [
        output[: next((place + 1 for place, token in enumerate(output) if token in known), len(output))]
        for output in outputs
    ]


@contextmanager
def _settings(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's settings, which would otherwise be used for options that are not given."""
    before = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = before


@contextmanager
def _watched(model: Any, watch: _Watch) -> Iterator[None]:
    hooks = [
        model.register_forward_pre_hook(watch.before, with_kwargs=True),
        model.register_forward_hook(watch.after),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def load_assistant(name: str, dtype: str, device: str) -> PreTrainedModel:
    """Load the draft model of assisted generation, in the target's dtype, on its device.

    Raises:
        OutpaceError: it cannot be loaded.
    """
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=getattr(torch, dtype), use_safetensors=True
        )
    except Exception as error:  # transformers and the hub may raise any error
        raise OutpaceError(
            f"cannot load the assistant {name}: {first_line(error)}; give another --assistant"
        ) from error
    model.to(device).eval()
    # For answers of fixed length, an end token is an ordinary token for the assistant too.
    model.generation_config.eos_token_id = None
    loaded: PreTrainedModel = model
    return loaded
