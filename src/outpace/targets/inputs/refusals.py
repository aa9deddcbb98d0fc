"""Checks of a transformers model's config for use as a target, and values read from it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from outpace.core import UnsupportedModel, described
from outpace.native.gpu import why_no_triton
from outpace.targets.inputs.config import (
    GPU,
    cache_argument,
    config_of,
    family,
    is_multimodal,
    runs_on_gpu,
    takes_no_tree,
)
from outpace.targets.inputs.masks import TREE, unknown_kinds

STOCK = "stock=True runs the model's own modules, whose sums depend on the number of rows"
# Families whose own window counts rows of a cache, and kinds of layers whose mask does: right for a chain.
# (That of Doge chooses rows among all, later ones too.)
_WINDOWS_OF_CHAINS = {"gpt_neo"}
_KINDS_OF_CHAINS = {"chunked_attention"}
# Families that misuse a mask that they are given.
_MISUSED = {
    "led": "its decoder leaves out the mask of a single row, which texts of different lengths need",
    "t5gemma2": "its decoder joins the masks of its own rows and of its source's",
    "nllb-moe": "its experts take a row of the decoder's mask for one of pads",
}
TEXT, FEATURES = "input_ids", "input_features"  # what an encoder may read
_NEEDED_OF_SEQ2SEQ = ("attention_mask", "encoder_outputs", "decoder_input_ids")
# What a tree needs; an encoder-decoder model's positions are those of ``positions.positioning_of``.
_TREE_ARGUMENTS = ("attention_mask", "position_ids")
_TREE_ARGUMENTS_OF_SEQ2SEQ = ("decoder_attention_mask",)


def refuse_by_config(model: Any, seq2seq: bool = False, states: bool = False) -> None:
    """Refuse models known to be unsupported before any forward.

    Args:
        seq2seq: True if an encoder-decoder model is expected.
        states: True if layers may keep a state.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """
    name = family(model)
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModel(
            f"{name} is compiled by torch.compile, whose code is for other shapes than steps have; pass the "
            "model inside it, model._orig_mod"
        )
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"{name} is not a transformers PreTrainedModel; pass the model inside it")
    offloaded = any("_hf_hook" in vars(module) for module in model.modules())
    if not offloaded and all(weight.is_meta for weight in model.parameters()):
        raise UnsupportedModel(
            f"{name} is on torch's device meta, which has no weights; load it with from_pretrained"
        )
    if bool(model.config.is_encoder_decoder) != seq2seq:
        kind = "a decoder-only" if seq2seq else "an encoder-decoder"
        raise UnsupportedModel(f"{name} is {kind} model; outpace.Target(model) picks the class for it")
    if model.get_output_embeddings() is None:
        loader = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
        raise UnsupportedModel(f"{name} has no language modeling head; load it with {loader}")
    if not hasattr(_embeddings(model), "weight"):
        raise UnsupportedModel(
            f"{name} has no single table of embeddings: it reads more than a text's tokens"
        )
    if any(_without_weights(module) for module in model.modules()):
        raise UnsupportedModel(f"{name} has released weights to another target; load it again")
    if not getattr(model.config, "return_dict", True):
        raise UnsupportedModel(f"{name} returns tuples; set model.config.return_dict = True")
    refuse_state(model, states)
    if missing := not_taken(model, needed(model, seq2seq)):
        inner = getattr(model, "language_model", None)  # BLIP-2 lets it generate from embeddings
        remedy = (
            "; its language_model does: make a target of that, for text alone" if inner is not None else ""
        )
        raise UnsupportedModel(
            f"{name} takes no {missing}, so a draft cannot follow what is in a cache{remedy}"
        )
    configured = _per_tensor_activations(getattr(model.config, "quantization_config", None))
    if configured or any(_scaled_per_tensor(weight) for weight in model.parameters()):
        raise UnsupportedModel(
            f"{name} scales its activations per tensor as it runs, so that each row changes the others; "
            "quantise activations per token (per row), or statically"
        )
    refuse_capacity(model)
    if any(_finds_outliers(module) for module in model.modules()):
        raise UnsupportedModel(
            f"{name} picks columns of outliers from all rows (LLM.int8()), so rows change each other; "
            "load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
        )
    refuse_training(model)


def _embeddings(model: Any) -> Any:
    """The table of input embeddings; None for a model of which transformers knows none."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def needed(model: Any, seq2seq: bool) -> tuple[str, ...]:
    """The arguments that a target passes to the forward of a model: of an encoder too, or a decoder alone."""
    return (*(_NEEDED_OF_SEQ2SEQ if seq2seq else ()), cache_argument(model))


def refuse_capacity(model: Any) -> None:
    """Refuse a model whose experts have no room for all rows.

    Raises:
        UnsupportedModel: named by family, with the reason.
    """
    if getattr(model.config, "expert_capacity", None) and not _keeps_all(model.config):
        raise UnsupportedModel(
            f"{family(model)} drops tokens beyond the capacity of its experts, so that rows change each other"
        )


def refuse_unread(model: Any) -> None:
    """Refuse a model whose encoder reads neither text nor features.

    Raises:
        UnsupportedModel: named by family.
    """
    if model.main_input_name not in (TEXT, FEATURES):
        raise UnsupportedModel(
            f"{family(model)} reads {model.main_input_name}; supported are {TEXT} and {FEATURES}"
        )


def refuse_training(model: Any) -> None:
    """Refuse a model in training mode, before it is tested and in each forward.

    Raises:
        UnsupportedModel: it is.
    """
    if model.training:
        raise UnsupportedModel(
            f"{family(model)} is in training mode, where dropout changes every forward; call model.eval()"
        )


def check_stock(model: Any) -> None:
    """Refuse a model whose steps cannot run on its own modules.

    Raises:
        UnsupportedModel: its attention takes no tree.
    """
    if takes_no_tree(model.config.get_text_config(decoder=True)):
        raise UnsupportedModel(
            f"{family(model)} runs on kernels without masks, which outpace replaces; load it with "
            "attn_implementation='sdpa', or leave stock out"
        )


def why_chains_only(model: Any, seq2seq: bool = False, states: bool = False) -> str | None:
    """The reason why a model can be given chains but no trees; None if it is to be given trees.

    A tree's positions differ from its rows' order, and its mask from a causal one. For a chain of one
    sequence the model's own positions and mask are right.

    Args:
        states: its layers may keep a state.

    Raises:
        UnsupportedModel: its attention is not known to be right for a chain either. The self-test cannot
            tell, since its texts are shorter than any window in use.
    """
    if states and not attends(model.config.get_text_config(decoder=True)):
        return None
    if missing := not_taken(model, _TREE_ARGUMENTS_OF_SEQ2SEQ if seq2seq else _TREE_ARGUMENTS):
        return f"it takes no {missing}"
    if (kind := model.config.model_type) in _MISUSED:
        return _MISUSED[kind]
    config = model.config.get_text_config(decoder=True)
    if seq2seq:
        config = config_of(model.get_decoder(), model)
    if window := _unknown_window(config):
        why = f"limits its attention by {window}, not by a sliding_window as transformers' masks do"
        if config.model_type not in _WINDOWS_OF_CHAINS:
            raise UnsupportedModel(f"{family(model)} {why}")
        return f"it {why}"
    if getattr(model.config, "alibi", False):
        return "it uses ALiBi, which counts columns: a tree's are not its positions"
    if kinds := unknown_kinds(config, states):
        why = f"has attention layers of kind {', '.join(kinds)}, whose mask is not known here"
        if not _KINDS_OF_CHAINS.issuperset(kinds):
            raise UnsupportedModel(f"{family(model)} {why}")
        return f"it {why}"
    return None


def not_taken(model: Any, arguments: Iterable[str]) -> str:
    """Those of these arguments that a model's forward lacks, as text."""
    accepted = inspect.signature(model.forward).parameters
    return ", ".join(argument for argument in arguments if argument not in accepted)


def why_not_exact(model: Any, exact: bool | Literal["auto"], native: bool = False) -> str | None:
    """The reason not to try a bit-exact step with a model; None if it is to be tried.

    Args:
        native: its forwards are computed in C, where exactness costs nothing.
    """
    if exact is False:
        return "exact is off"
    on_gpu = runs_on_gpu(model)
    if on_gpu and exact == "auto":
        return "exact='auto' leaves GPUs as they are, since the cost there is not measured"
    if on_gpu and (why := why_no_triton()):
        return why
    if why := why_untouchable(model, GPU if on_gpu else "cpu"):
        return why
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in ("sdpa", "eager", *([TREE] if on_gpu else [])):
        return f"it uses its own attention, {attention!r}"
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"sums over {model.dtype} would need a wider type"
    if exact == "auto" and model.dtype == torch.float32 and not native:
        return "near-ties flip so rarely in float32 that exact='auto' leaves it unchanged"
    return None


def why_untouchable(model: Any, device: str = "cpu") -> str | None:
    """The reason why a model's modules cannot be replaced on a kind of device; None if they can."""
    devices = {weight.device.type for weight in model.parameters()}
    if devices != {device}:
        return f"it runs on {', '.join(sorted(devices))}; this is for a {'CPU' if device == 'cpu' else 'GPU'}"
    if any("forward" in vars(module) for module in model.modules()):
        return "modules have a forward of their own (device_map does this)"
    if getattr(model, "peft_config", None) or any(
        hasattr(module, "base_layer") for module in model.modules()
    ):
        return "it has adapters, which may change its weights; merge them first"
    return None


def keeps_states(model: Any) -> bool:
    """True if some layers of a model keep a state as transformers' linear attention does."""
    if not isinstance(model, PreTrainedModel):
        return False
    config = model.config.get_text_config(decoder=True)
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in _layers_of(config))


def attends(config: Any) -> bool:
    """True if some layers of a model with states have attention."""
    return any(type(layer) is not LinearAttentionLayer for layer in _layers_of(config))


def _layers_of(config: Any) -> list[Any]:
    """The layers of transformers' cache; none for configs that it makes no cache for."""
    try:
        return list(DynamicCache(config=config).layers)
    except Exception:  # of any entries; ``refuse_by_config`` says which
        return []


def state_refused(model: Any) -> str:
    """The reason why a model with a recurrent state is refused."""
    if is_multimodal(model.config):
        return (
            "reads more than text, and a recurrent state is kept for text alone: load its language model by "
            "itself (AutoModelForCausalLM, if that has its family)"
        )
    return (
        "keeps a recurrent state by functions that outpace does not know, so a rejected draft could not be "
        "taken out of it"
    )


def refuse_state(model: PreTrainedModel, states: bool) -> None:
    """Refuse layers that keep something unknown, or a state where none may be."""
    name, config = family(model), model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    attention_only = kinds and kinds <= {"full_attention", "sliding_attention"}
    if getattr(model, "_is_stateful", False) and not attention_only and not states:
        raise UnsupportedModel(f"{name} {state_refused(model)}")
    if getattr(config, "recurrent_kv_cache_mode", "") == "last_loop" and config.n_recurrent_loops > 1:
        raise UnsupportedModel(
            f"{name} runs layers in loops of which the last alone keeps its keys and values "
            "(recurrent_kv_cache_mode='last_loop'); the others read them from a cache unlike outpace's"
        )
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:  # of any entries
        raise UnsupportedModel(
            f"{name}: transformers cannot make a cache from its config: {described(error)}"
        ) from error
    for layer in layers:
        kind = type(layer).__name__
        # By name: layers without rows of their own (shared keys and values) have no public class.
        if states and isinstance(layer, LinearAttentionCacheLayerMixin):
            continue
        if isinstance(layer, LinearAttentionCacheLayerMixin) and is_multimodal(model.config):
            raise UnsupportedModel(f"{name} {state_refused(model)}")
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) and kind != "DummyLayer":
            raise UnsupportedModel(
                f"{name} has layers that keep more than keys and values by position, such as a recurrent or "
                f"convolution state ({kind}); that cannot be undone when a draft is rejected"
            )


def _without_weights(module: nn.Module) -> bool:
    """True if a module has a weight without data, and is not offloaded, with a hook that fetches it."""
    weights = module.parameters(recurse=False)
    return "forward" not in vars(module) and any(weight.is_meta for weight in weights)


def _unknown_window(config: Any) -> str | None:
    """Detect a model-specific window, such as GPT-Neo's, which counts rows instead of positions.

    The self-test cannot detect it, since its texts are shorter than any window in use.
    """
    options: dict[str, Any] = vars(config)
    windows = [name for name, value in options.items() if re.search("window_(size|len)", name) and value]
    return windows[0] if windows else None


def _scaled_per_tensor(weight: Any) -> bool:
    """True if a weight of torchao's scales its layer's input per tensor as it runs.

    ``quantize_`` leaves no trace in the model's config.
    """
    dynamic = getattr(weight, "act_quant_scale", None) is None
    return dynamic and "PerTensor" in repr(getattr(weight, "act_quant_kwargs", ""))


def _keeps_all(config: Any) -> bool:
    """True if NLLB's experts have room for all rows of a forward, as in its published config."""
    return bool(getattr(config, "moe_eval_capacity_token_fraction", 0) >= 1)


def _finds_outliers(module: Any) -> bool:
    """True if a layer of bitsandbytes treats columns apart in which some row exceeds a threshold."""
    return type(module).__name__ == "Linear8bitLt" and module.state.threshold > 0


def _per_tensor_activations(quantization: Any) -> bool:
    """True if activations are quantised dynamically with a scale per tensor.

    Detects compressed-tensors and Quark (a nested entry with ``dynamic`` or ``is_dynamic``, and ``strategy``
    or ``qscheme``) and torchao (a DynamicActivation config of PerTensor granularity). transformers' own
    fp8 and fbgemm_fp8 scale by row or by block of a row.
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
