"""Whether a transformers model can be a target: what its config says, and what a tree of tokens shows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from outpace.core import UnsupportedModel
from outpace.targets.base import Rows, TargetModel

# Under these the longest position in a forward decides the rope of all its rows, past the original length.
_ROPE_BY_LENGTH = ("dynamic", "longrope")
_NEEDED = ("attention_mask", "position_ids", "past_key_values")


def family(model: Any) -> str:
    """How errors name a model."""
    return f"{type(model).__name__} ({model.config.model_type})"


def refuse_by_config(model: Any) -> None:
    """Refuse what is known to be wrong before any forward.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """
    name = family(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"{name} is not a transformers PreTrainedModel; pass the model inside (of a PEFT model, get_base_model())"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoder-only models are supported")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language modeling head; load it with AutoModelForCausalLM")
    _refuse_state(model)
    accepted = inspect.signature(model.forward).parameters
    missing = [argument for argument in _NEEDED if argument not in accepted]
    if missing:
        raise UnsupportedModel(f"{name} takes no {', '.join(missing)}, so a tree cannot be placed")
    if _per_tensor_activations(getattr(model.config, "quantization_config", None)):
        raise UnsupportedModel(
            f"{name} scales its activations per tensor as it runs, so that each row changes the others; quantise "
            "activations per token (per row), or statically"
        )
    if model.training:
        raise UnsupportedModel(
            f"{name} is in training mode, where dropout changes every forward; call model.eval()"
        )


def _refuse_state(model: PreTrainedModel) -> None:
    """Refuse layers that keep anything but keys and values by position: such state cannot be undone."""
    name, config = family(model), model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    attention_only = kinds and kinds <= {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False) and not attention_only:
        raise UnsupportedModel(
            f"{name} keeps a recurrent state, which cannot be undone when a draft is rejected"
        )
    for layer in DynamicCache(config=config).layers:
        kind = type(layer).__name__
        # By name: layers without rows of their own (shared keys and values) have no public class.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and kind != "DummyLayer":
            raise UnsupportedModel(
                f"{name} has layers that keep more than keys and values by position, such as a recurrent or "
                f"convolution state ({kind}); that cannot be undone when a draft is rejected"
            )


def _per_tensor_activations(quantization: Any) -> bool:
    """Whether activations are quantised with a scale of the whole tensor, found as the model runs.

    Knows compressed-tensors and Quark (a nested entry with ``dynamic`` or ``is_dynamic``, and ``strategy`` or
    ``qscheme``) and torchao (a DynamicActivation config of PerTensor granularity). transformers' own fp8 and
    fbgemm_fp8 scale by row or by block of a row.
    """
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping):
        kind = repr(getattr(quantization, "quant_type", ""))
        if "DynamicActivation" in kind and "PerTensor" in kind:
            return True
        quantization = vars(quantization)
    for entry in _mappings(quantization):
        dynamic = entry.get("dynamic", entry.get("is_dynamic"))
        if dynamic is True and entry.get("strategy", entry.get("qscheme")) in ("tensor", "per_tensor"):
            return True
    return False


def _mappings(tree: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings in nested mappings, lists and plain objects with ``to_dict`` or ``model_dump``."""
    for convert in ("to_dict", "model_dump"):
        if hasattr(tree, convert):
            tree = getattr(tree, convert)()
    if isinstance(tree, Mapping):
        yield tree
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for branch in tree:
            yield from _mappings(branch)


def context_of(config: Any) -> int | None:
    """Positions a model was made for, limited to those where its rows do not see each other's length."""
    context: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if any(kind.get("rope_type") in _ROPE_BY_LENGTH for kind in kinds):
        originals = [kind.get("original_max_position_embeddings") for kind in kinds]
        originals.append(getattr(config, "original_max_position_embeddings", None))
        known = [length for length in [context, *originals] if length]
        return min(known, default=None)
    return context


# A tree of seven rows, four deep, with branches that interleave; its paths, as rows.
_PARENTS = (-1, 0, 0, 1, 1, 2, 4)
_PATHS = ((0, 1, 3), (0, 1, 4, 6), (0, 2, 5))


@torch.inference_mode()
def self_test(target: TargetModel, model: PreTrainedModel, device: torch.device) -> None:
    """Decode a tree beside a second sequence, keep a path, go on with one row; compare with plain forwards.

    Args:
        device: where token ids go in.

    Raises:
        UnsupportedModel: some logits differ by more than rounding.
    """
    compare = _Comparison(model, device)
    try:
        _compare_tree(target, model, compare)
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{family(model)} fails on a tree of tokens: {error!r}") from error


def _compare_tree(target: TargetModel, model: PreTrainedModel, compare: _Comparison) -> None:
    room = 9 if target.context is None else target.context - 5
    if room < 1:
        raise UnsupportedModel(f"{family(model)} has a context of only {target.context} tokens")
    # The ids are few and spread over the vocabulary, whatever its size; equal ones only weaken the test.
    size = min(target.vocabulary, model.get_input_embeddings().weight.shape[0])
    stride = next(n for n in range(round(0.618 * size), 2 * size + 2) if math.gcd(n, size) == 1)
    ids = [(1 + i * stride) % size for i in range(20)]
    prompts = [ids[: min(5, room)], ids[5 : 5 + min(3, room)]]
    tree, beside, last = Rows(ids[8:15], _PARENTS), Rows(ids[15:17]), ids[17]
    cache = target.new_cache(slots=2, length=64)
    for place, prompt in enumerate(prompts):
        cache.allocate()
        target.forward(cache, [Rows(prompt)], first=place, wanted="none")
        cache.keep([range(len(prompt))])
    found = target.forward(cache, [tree, beside]).logits
    assert found is not None
    for path in _PATHS:
        compare(prompts[0], [tree.tokens[node] for node in path], found[0, list(path)])
    compare(prompts[1], beside.tokens, found[1, :2])
    cache.keep([_PATHS[1], range(2)])
    found = target.forward(cache, [Rows([last])], first=0).logits
    assert found is not None
    accepted = [tree.tokens[node] for node in _PATHS[1]]
    compare([*prompts[0], *accepted], [last], found[0, :1])


class _Comparison:
    """Compares rows of a tree with plain decoding."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        # A share of the spread of a row's logits: rounding stays well below it, a wrong mask well above.
        if model.dtype == torch.float64:
            self._allowed = 1e-4  # some attention computes its softmax in float32 always
        elif model.dtype == torch.float32:
            self._allowed = 1e-3 if torch.get_float32_matmul_precision() == "highest" else 1e-2
        else:
            self._allowed = 0.1

    def __call__(self, prefix: list[int], path: list[int], found: Tensor) -> None:
        """Refuse the family if the rows ``found`` [n, vocabulary] differ from those of a plain forward."""
        text = torch.tensor([[*prefix, *path]], device=self._device)
        plain = self._model(input_ids=text, use_cache=False).logits[0, -len(path) :]
        difference = (found.double() - plain.to(found.device).double()).square().mean(dim=-1).sqrt()
        share = difference / plain.double().std(dim=-1).clamp(min=1e-12).to(found.device)
        off = float(share.max())
        if not off <= self._allowed:
            raise UnsupportedModel(
                f"{family(self._model)} gives other logits for a tree of tokens than for its paths (off by {off:.2g} of "
                "their spread): it does not honour a 4-D mask or positions"
            )
