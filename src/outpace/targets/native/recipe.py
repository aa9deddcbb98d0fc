"""How the layers of a family compute, for ``native/forward.h``: one recipe each, filled from the config.

Module names are transformers'. What a recipe does not say is as in Llama. A new family is a function here,
its entry in ``RECIPES``, and a row in the test that compares it with its stock layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

NormKind = Literal["rms", "wide rms", "layer"]


@dataclass(frozen=True)
class Recipe:
    """The form of a decoder's layers.

    Attributes:
        stem: the beginning of its classes' names; of a subclass nothing is known.
        norm: ``rms`` rounds before it multiplies by the weight, ``wide rms`` after it.
        plus_one: the weight of a norm is one more than the number that is stored.
        before, between: norms of the input of attention and of the feed-forward part; "" for none.
        after, last: norms of what these give.
        whole: the norms of queries and keys are of all heads together.
        parallel: both parts read the layer's input.
        attention, feed: the modules of the two parts.
        joined: linear layers of queries, keys and values, or the one of all.
        by_head: this one has queries, keys and values of a head side by side.
        output: attention's last layer.
        up, down: layers of the feed-forward part; two, or one of both, with a gate.
        gated: it has a gate.
        interleaved: neighbouring numbers of a head are rotated together.
        repeated: its angles stand twice side by side, not in two halves.
        unrotated: numbers of the layers without rotation.
        windows: kind of a layer (``config.layer_types``) -> columns that it sees at most.
        window: the same for models of one kind.
        angles_by_kind: the rotary module is asked for a kind.
        residual: what is added to a layer's input is multiplied by it.
        embedding: embeddings are multiplied by it, given ones too.
        logit: logits are multiplied by it.
    """

    stem: str
    norm: NormKind = "rms"
    plus_one: bool = False
    before: str = "input_layernorm"
    after: str = ""
    between: str = "post_attention_layernorm"
    last: str = ""
    whole: bool = False
    parallel: bool = False
    attention: str = "self_attn"
    feed: str = "mlp"
    joined: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    output: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    gated: bool = True
    interleaved: bool = False
    repeated: bool = False
    unrotated: frozenset[int] = frozenset()
    windows: Mapping[str, int] | None = None
    window: int = 0
    angles_by_kind: bool = False
    residual: float = 1.0
    embedding: float = 1.0
    logit: float = 1.0


def _windows(config: Any) -> Mapping[str, int]:
    """The columns that layers of each kind see; 0 for all."""
    return {"sliding_attention": config.sliding_window or 0, "full_attention": 0}


def _sliding(config: Any, stem: str) -> Recipe:
    """Llama's form, with a sliding window in all layers if the config has one."""
    return Recipe(stem, window=config.sliding_window or 0)


def _gemma(config: Any, stem: str) -> Recipe:
    return Recipe(
        stem,
        norm="wide rms",
        plus_one=True,
        after="post_attention_layernorm",
        between="pre_feedforward_layernorm",
        last="post_feedforward_layernorm",
        windows=_windows(config),
        angles_by_kind=stem == "Gemma3",
    )


def _olmo(config: Any, stem: str) -> Recipe:
    by_kind = stem == "Olmo3"
    return Recipe(
        stem,
        norm="wide rms",
        before="",
        after="post_attention_layernorm",
        between="",
        last="post_feedforward_layernorm",
        whole=True,
        windows=_windows(config) if by_kind else None,
        angles_by_kind=by_kind,
    )


def _phi3(config: Any) -> Recipe:
    return replace(_sliding(config, "Phi3"), joined=("qkv_proj",), up=("gate_up_proj",))


def _granite(config: Any) -> Recipe:
    return Recipe(
        "Granite",
        residual=config.residual_multiplier,
        embedding=config.embedding_multiplier,
        logit=1 / config.logits_scaling,
    )


def _smollm3(config: Any) -> Recipe:
    kept = enumerate(config.no_rope_layers)
    found = Recipe("SmolLM3", unrotated=frozenset(layer for layer, rotates in kept if not rotates))
    return replace(found, windows=_windows(config)) if config.use_sliding_window else found


def _cohere2(config: Any) -> Recipe:
    kinds = enumerate(config.layer_types)
    return Recipe(
        "Cohere2",
        norm="layer",
        between="input_layernorm",
        parallel=True,
        interleaved=True,
        repeated=True,
        unrotated=frozenset(layer for layer, kind in kinds if kind != "sliding_attention"),
        windows=_windows(config),
        logit=config.logit_scale,
    )


def _starcoder2(config: Any) -> Recipe:
    found = _sliding(config, "Starcoder2")
    return replace(found, norm="layer", up=("c_fc",), down="c_proj", gated=False)


def _gpt_neox(config: Any) -> Recipe:
    return Recipe(
        "GPTNeoX",
        norm="layer",
        parallel=config.use_parallel_residual,
        attention="attention",
        joined=("query_key_value",),
        by_head=True,
        output="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        gated=False,
    )


def _stablelm(config: Any) -> Recipe:
    parallel = config.use_parallel_residual
    between = "input_layernorm" if parallel else "post_attention_layernorm"
    return Recipe("StableLm", norm="layer", parallel=parallel, between=between)


def _glm4(config: Any) -> Recipe:
    return Recipe(
        "Glm4",
        after="post_self_attn_layernorm",
        last="post_mlp_layernorm",
        up=("gate_up_proj",),
        interleaved=True,
    )


# Type of a model -> its recipe, from its config.
RECIPES: Mapping[str, Callable[[Any], Recipe]] = {
    "cohere2": _cohere2,
    "gemma2": lambda config: _gemma(config, "Gemma2"),
    "gemma3_text": lambda config: _gemma(config, "Gemma3"),
    "glm4": _glm4,
    "gpt_neox": _gpt_neox,
    "granite": _granite,
    "llama": lambda config: Recipe("Llama"),
    "mistral": lambda config: _sliding(config, "Mistral"),
    "olmo2": lambda config: _olmo(config, "Olmo2"),
    "olmo3": lambda config: _olmo(config, "Olmo3"),
    "phi3": _phi3,
    "qwen2": lambda config: Recipe("Qwen2", windows=_windows(config)),
    "qwen3": lambda config: Recipe("Qwen3", windows=_windows(config)),
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
