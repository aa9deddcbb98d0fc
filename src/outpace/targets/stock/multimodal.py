"""Stock transformers models whose prompts contain images, or other inputs that become embeddings.

Such a model turns images into rows of embeddings, puts them into its prompt in place of placeholder tokens,
and runs a language model over the prompt. From then on it decodes text. So an image matters only where the
prompt is fed: this target takes the language model's inputs, embeddings and positions, from the model itself,
and feeds those. Drafts are text.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from outpace.cache import Cache, Slot, Window
from outpace.core import OutpaceError, PromptStates, Source, UnsupportedModel, in_progress
from outpace.targets.batch import Batch
from outpace.targets.inputs.config import family
from outpace.targets.inputs.forward import positions_of
from outpace.targets.inputs.refusals import refuse_training
from outpace.targets.step.agreement import agree, shaken
from outpace.targets.stock.causal import CausalTarget
from outpace.transfer import upload

# Arguments of a language model for a prompt, besides flags; it must not need any others.
_KNOWN = {"inputs_embeds", "position_ids", "attention_mask", "past_key_values", "cache", "cache_position"}
_PLAIN = (bool, int, float, str)
# What else it may be given (DeepStack, Meng et al. 2024, arXiv 2406.04334): which rows [B, length] are those
# of images, and for each of its first layers what is added to their outputs, [rows of images, hidden size].
_MARKED, _ADDED = "visual_pos_masks", "deepstack_visual_embeds"


class MultimodalTarget(CausalTarget):
    """A model of text and images (Llava, Qwen2-VL, SmolVLM, Idefics3) as a target of text.

    A request's source is what the model's processor returns for its prompt, a batch of one: ``input_ids``,
    ``pixel_values`` and the model's further inputs. Its prompt is the same token ids, placeholders included.
    The first such request tests the model: the logits after its prompt must be those of a plain forward.

    The arguments are those of ``CausalTarget``.
    """

    _never_fixed = "positions of images are given from outside"
    _never_flat = "states of images are added to padded rows"
    _never_trees = "states of images are given to layers of the model itself"
    _needs_weights = True  # of its encoder, which reads images
    not_rounded = "it reads more than text"

    def __init__(self, model: Any, **options: Any) -> None:
        self._prompts: WeakKeyDictionary[Slot, PromptStates] = WeakKeyDictionary()
        self._keys: WeakKeyDictionary[PromptStates, list[Hashable]] = WeakKeyDictionary()
        self._tested = False
        super().__init__(model, **options)

    # -- a prompt with images ----------------------------------------------------------------------------

    def encode(self, source: Any) -> PromptStates | None:
        """A prompt with images as the language model's inputs; None for a prompt of text.

        Args:
            source: None; a mapping of the model's inputs, for one prompt; or PromptStates.

        Raises:
            OutpaceError: the source is something else.
            UnsupportedModel: the language model reads more of an image than embeddings and positions.
        """
        if source is None or isinstance(source, PromptStates):
            return source
        ids = source.get("input_ids") if isinstance(source, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise OutpaceError(
                f"{family(self.model)}: a source is what the processor returns for one prompt, a mapping "
                "with input_ids [1, length] and pixel_values"
            )
        mask = source.get("attention_mask")
        if mask is not None and not bool((mask != 0).all()):
            raise OutpaceError("the source's attention_mask has zeros; give one prompt without pads")
        inputs = {name: value for name, value in source.items() if name != "attention_mask"}
        return self.prompts(inputs, [0])[0]

    @torch.inference_mode()
    def prompts(self, inputs: Mapping[str, Any], pads: Sequence[int]) -> list[PromptStates]:
        """The language model's inputs for each prompt of a batch.

        Args:
            inputs: arguments of the model's forward, without a cache.
            pads: number of pads before each prompt.

        Raises:
            OutpaceError, UnsupportedModel: as ``encode``.
        """
        refuse_training(self.model)
        if self.options.static:
            raise OutpaceError("forwards of fixed shapes take no images; make the target without static=True")
        name = family(self.model)
        here = {key: _on(self.device, value) for key, value in inputs.items() if key != "labels"}
        logits, captured = self._captured(here, whole=not self._tested)
        deep = _deep(captured.pop(_MARKED, None), captured.pop(_ADDED, None))
        odd = [key for key, value in captured.items() if key not in _KNOWN and not _harmless(value)]
        mask = captured.get("attention_mask")
        if odd or isinstance(mask, Mapping) or (isinstance(mask, Tensor) and mask.dim() != 2):
            what = ", ".join(odd) or "a mask of its own"
            raise UnsupportedModel(
                f"the language model of {name} reads {what} besides embeddings and positions, which this "
                "target cannot give it with a part of a prompt; pass text alone"
            )
        states = captured.get("inputs_embeds")
        if not isinstance(states, Tensor):
            raise UnsupportedModel(f"the language model of {name} is not given embeddings; pass text alone")
        positions = captured.get("position_ids")
        found = []
        for row, front in enumerate(pads):
            axes = None if positions is None else _axes(positions, row, front, name)
            added = None if deep is None else deep[:, row, front:].clone()
            found.append(PromptStates(states[row, front:].clone(), positions=axes, deep=added))
        if self.why_chains_only and any(prompt.positions is not None for prompt in found):
            raise UnsupportedModel(
                f"{name} gives a prompt with images positions of its own, and its decoder takes none: "
                f"{self.why_chains_only}; pass text alone"
            )
        if logits is not None:
            with shaken(self.model):
                again, _ = self._captured(here, whole=True)
            assert again is not None
            ids = here["input_ids"][0, pads[0] :].tolist()
            self._test(found[0], ids, logits[0, -1:], again[0, -1:])
        return found

    def _captured(self, inputs: Mapping[str, Any], whole: bool) -> tuple[Tensor | None, dict[str, Any]]:
        """The language model's inputs for a prompt and, if ``whole``, the logits after it."""
        here = sys._getframe()
        captured: dict[str, Any] = {}

        def look(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            # Threads may share a model, and an interrupt may leave this hook behind.
            if in_progress(here) and not captured:
                if args:
                    raise UnsupportedModel(f"{family(self.model)} does not name its language model's inputs")
                captured.update(kwargs)
                if not whole:
                    raise _Enough

        hook = self.model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
        try:
            more = {"logits_to_keep": 1} if self._modules.keeps_logits else {}
            output = self.model(**{**inputs, **more, "use_cache": False, "return_dict": True})
        except _Enough:
            return None, captured
        finally:
            hook.remove()
        return output.logits, captured

    def _test(self, prompt: PromptStates, ids: list[int], logits: Tensor, again: Tensor) -> None:
        """Compare the logits after the first prompt with those of the model itself, [1, vocabulary].

        Args:
            again: the model's own, with embeddings that are rounded otherwise.
        """
        cache = self.new_cache(length=len(ids))
        slot = self.open(cache, prompt)
        half = len(ids) // 2
        if half:
            self.forward(cache, Batch.of({slot: ids[:half]}, None))
            cache.keep({slot: range(half)})
        found = self.forward(cache, Batch.of({slot: ids[half:]})).logits_of(slot)[-1:]
        if not agree(found, logits, again):
            raise UnsupportedModel(
                f"{family(self.model)} gives other logits for a prompt with images than for its embeddings "
                "and positions, so that drafts cannot be verified; pass text alone"
            )
        self._tested = True

    def open(self, cache: Cache, source: Source | None = None, rows: int = 0) -> Slot:
        slot = super().open(cache, source, rows)
        if isinstance(source, PromptStates):
            self._prompts[slot] = source
        return slot

    def row_keys(self, tokens: Sequence[int], source: Source | None) -> Sequence[Hashable] | None:
        """The tokens and, where rows are not a text's, a digest of what the language model is given."""
        if not isinstance(source, PromptStates):
            return super().row_keys(tokens, source)
        length = len(source.states)
        if (keys := self._keys.get(source)) is None:
            keys = self._keys[source] = self._prompt_keys(tokens[:length], source)
        if source.positions is None:
            return [*keys, *tokens[length:]]
        last = source.positions[:, -1].tolist()
        after = ([one + 1 + place for one in last] for place in range(len(tokens) - length))
        return [*keys, *map(_placed, tokens[length:], range(length, len(tokens)), after)]

    @torch.inference_mode()
    def _prompt_keys(self, tokens: Sequence[int], prompt: PromptStates) -> list[Hashable]:
        """The keys of a prompt's rows."""
        usual = self.embed(upload(tokens, self.device)).to(prompt.states)
        given = [prompt.states] if prompt.deep is None else [prompt.states, *prompt.deep]
        odd = (prompt.states != usual).any(dim=-1)
        for added in given[1:]:
            odd |= (added != 0).any(dim=-1)
        rows = torch.cat([one[odd] for one in given], dim=-1).contiguous().cpu()
        digests = iter([hashlib.sha256(row.tobytes()).digest() for row in rows.view(torch.uint8).numpy()])
        keys: list[Hashable] = list(tokens)
        if prompt.positions is not None:
            axes = prompt.positions.T.tolist()
            keys = list(map(_placed, tokens, range(len(tokens)), axes))
        return [(key, next(digests)) if other else key for key, other in zip(keys, odd.tolist(), strict=True)]

    # -- the forward -------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _first_states(self, cache: Cache, batch: Batch) -> dict[Slot, Tensor] | None:
        states = super()._first_states(cache, batch)
        read = {
            slot: prompt
            for slot in batch.slots
            if (prompt := self._prompts.get(slot)) is not None and cache.length(slot) < len(prompt.states)
        }
        if not read:
            return states
        if states is None:
            ids = upload(batch.tokens.tolist(), self.device)
            pieces = self.embed(ids).split(batch.widths.tolist())
            states = dict(zip(batch.slots, pieces, strict=True))
        for slot, prompt in read.items():
            row = batch.rows[slot]
            at = upload(positions_of(row, cache.length(slot), len(row.tokens)), self.device)
            inside = at < len(prompt.states)
            states[slot][inside] = prompt.states[at[inside]].to(states[slot])
        return states

    @contextmanager
    def _adding(self, window: Window) -> Iterator[None]:
        """Context in which the language model gets what is added to a window's rows of images, if any."""
        rows: dict[int, Tensor] = {}
        for sequence, slot in enumerate(window.slots):
            prompt = None if slot is None else self._prompts.get(slot)
            if prompt is not None and prompt.deep is not None:
                rows[sequence] = prompt.deep[:, window.offsets[sequence] :][:, : window.widths[sequence]]
        if not any(added.any() for added in rows.values()):
            yield
            return
        some = next(iter(rows.values()))
        dense = some.new_zeros((len(some), len(window.slots), window.width, some.shape[-1]))
        for sequence, added in rows.items():
            dense[:, sequence, : added.shape[1]] = added
        marked = torch.ones(dense.shape[1:3], dtype=torch.bool, device=dense.device)
        more = {_MARKED: marked, _ADDED: list(dense.flatten(1, 2))}
        forward = sys._getframe(2)  # this function is a generator, which contextlib has called

        def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
            return (args, {**kwargs, **more}) if in_progress(forward) else None

        hook = self._modules.step.get_decoder().register_forward_pre_hook(give, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _rotated(self, window: Window, positions: Tensor) -> Tensor:
        prompts = [None if slot is None else self._prompts.get(slot) for slot in window.slots]
        axes = next((len(p.positions) for p in prompts if p is not None and p.positions is not None), 0)
        if not axes:
            return positions
        found = positions.expand(axes, *positions.shape).clone()
        for sequence, prompt in enumerate(prompts):
            if prompt is not None and prompt.positions is not None:
                last = len(prompt.states) - 1
                inside = positions[sequence].clamp(max=last)
                found[:, sequence] = prompt.positions[:, inside] + (positions[sequence] - inside)
        return found


class _Enough(Exception):
    """The end of a forward once the language model's inputs are known."""


def _placed(token: int, place: int, axes: Sequence[int]) -> Hashable:
    """The key of a row of text: its token, and its positions if they are not its place."""
    return token if all(axis == place for axis in axes) else (token, *axes)


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _deep(marked: Tensor | None, added: Sequence[Tensor] | None) -> Tensor | None:
    """Tensor of what is added to the rows of prompts, [layers, B, length, hidden size]; None for nothing."""
    if marked is None or not added:
        return None
    deep = added[0].new_zeros((len(added), *marked.shape, added[0].shape[-1]))
    deep[:, marked] = torch.stack(list(added))
    return deep


def _harmless(value: Any) -> bool:
    """True for an argument that controls how a model runs, not its input."""
    return value is None or isinstance(value, _PLAIN) or (isinstance(value, Mapping) and not value)


def _axes(positions: Tensor, row: int, front: int, name: str) -> Tensor | None:
    """Positions of one prompt, [axes, length]; None if they count from 0 as a text's do."""
    if positions.dim() == 2:
        of_prompt = positions[row if len(positions) > 1 else 0, None, front:]
    else:
        # Qwen2-VL's first of four rows are the text's, which only a mask of the model's own would read.
        of_prompt = positions[-3:, row if positions.shape[1] > 1 else 0, front:]
    if bool((of_prompt == torch.arange(of_prompt.shape[1], device=of_prompt.device)).all()):
        return None
    if len(of_prompt) == 1:
        raise UnsupportedModel(f"{name} gives a prompt with images positions that do not count from 0")
    return of_prompt.clone()
