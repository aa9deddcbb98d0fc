"""Formats of published drafters: how a folder's config.json shows them, and which drafter reads them.

The list is that of what vLLM 0.33 and speculators load. The table of docs/reference/methods.md is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.core import OutpaceError

Config = Mapping[str, Any]
MASK_ENTRIES = ("pard_token", "ptd_token_id")  # of draft models that fill masked places, in vLLM's order


@dataclass(frozen=True)
class DrafterFormat:
    """A format of drafters.

    Attributes:
        name: whose it is, and of what method.
        shows: the entries of config.json by which it is known, for readers.
        known: whether a config.json has them.
        drafter: the drafter that reads it; empty if none does.
        reason: why none does, or what is not read.
        remedy: what to use in its place, where none does.
    """

    name: str
    shows: str
    known: Callable[[Config], bool]
    drafter: str = ""
    reason: str = ""
    remedy: str = ""


def _speculators(kind: str) -> Callable[[Config], bool]:
    return lambda config: config.get("speculators_model_type") == kind


def _has(*names: str) -> Callable[[Config], bool]:
    return lambda config: any(name in config for name in names)


def _of_type(*kinds: str) -> Callable[[Config], bool]:
    return lambda config: config.get("model_type") in kinds


def _architecture(word: str) -> Callable[[Config], bool]:
    return lambda config: any(word in str(one) for one in config.get("architectures") or ())


def given_by(config: Config) -> dict[str, Any]:
    """The entries of a config.json, those of its ``dflash_config`` among them."""
    nested = config.get("dflash_config")
    return {**config, **(nested if isinstance(nested, Mapping) else {})}


def is_dspark(config: Config) -> bool:
    """True if a config.json is a DSpark's."""
    named = _speculators("dspark")(config) or _has("markov_rank")(given_by(config))
    return named or _architecture("DSpark")(config)


def _further(*names: str) -> Callable[[Config], bool]:
    return lambda config: any(given_by(config).get(name) for name in names)


def _mtp(config: Config) -> bool:
    return str(config.get("model_type", "")).endswith("_mtp")


# The first that is known counts.
FORMATS = (
    DrafterFormat("outpace", "`method`", _has("method"), "that of its name"),
    DrafterFormat(
        "speculators, EAGLE-3", '`speculators_model_type: "eagle3"`', _speculators("eagle3"), "eagle"
    ),
    DrafterFormat(
        "speculators, DFlash",
        '`speculators_model_type: "dflash"`',
        _speculators("dflash"),
        "dflash",
    ),
    DrafterFormat(
        "DeepSeek-V4, DSpark",
        "`dspark_block_size`, or `dspark_target_layer_ids`",
        _has("dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id"),
        reason="its layers are DeepSeek-V4's own, which dflash does not compute",
        remedy="mtp, with the prediction layers of the checkpoint",
    ),
    DrafterFormat(
        "speculators, DeepSeek and SpecForge, DSpark",
        '`speculators_model_type: "dspark"`, or `markov_rank`',
        is_dspark,
        "dflash",
        "not its confidence head: the governor decides how much is drafted",
    ),
    DrafterFormat(
        "speculators and SpecForge, P-EAGLE",
        '`speculators_model_type: "peagle"`, or `PEagle` in `architectures`',
        lambda config: _speculators("peagle")(config) or _architecture("PEagle")(config),
        "peagle",
    ),
    DrafterFormat(
        "speculators, MTP",
        '`speculators_model_type: "mtp"`',
        _speculators("mtp"),
        "mtp",
    ),
    DrafterFormat(
        "speculators, other",
        "another `speculators_model_type`",
        _has("speculators_model_type"),
        reason="the kind is unknown",
        remedy="eagle or dflash, with a drafter of that kind",
    ),
    DrafterFormat(
        "transformers, Gemma 4's assistant",
        '`model_type: "gemma4_assistant"` or `"gemma4_unified_assistant"`',
        _of_type("gemma4_assistant", "gemma4_unified_assistant"),
        "assistant",
    ),
    DrafterFormat(
        "transformers, Muse's assistant (DFlash)",
        '`model_type: "muse_glimmer_assistant"`',
        _of_type("muse_glimmer_assistant"),
        "dflash",
    ),
    DrafterFormat(
        "SpecForge, Domino",
        '`projector_type: "domino"`',
        lambda config: given_by(config).get("projector_type") == "domino",
        reason="its recurrent head reads the embeddings of the tokens drafted before",
        remedy="dflash, with a DFlash or a DSpark",
    ),
    DrafterFormat("JetSpec", "`causal_head` in `dflash_config`", _further("causal_head"), "dflash"),
    DrafterFormat(
        "z-lab, DFlash 2",
        "`selector_rank` and `conv_kernel_size` in `dflash_config`",
        _further("selector_rank", "conv_kernel_size"),
        "dflash",
    ),
    DrafterFormat(
        "z-lab, DFlash", "`dflash_config`, or `block_size`", _has("dflash_config", "block_size"), "dflash"
    ),
    DrafterFormat(
        "IBM, MLP speculator",
        '`model_type: "mlp_speculator"`',
        _of_type("mlp_speculator"),
        reason="its heads have embeddings and norms of their own",
        remedy="hydra, whose heads read the same",
    ),
    DrafterFormat("FasterDecoding, Medusa", "`medusa_num_heads`", _has("medusa_num_heads"), "medusa"),
    DrafterFormat(
        "vLLM, Medusa", '`model_type: "medusa"`', _of_type("medusa"), "medusa", "not with a `token_map`"
    ),
    DrafterFormat("zankner, Hydra", "`hydra_num_heads`", _has("hydra_num_heads"), "hydra", "not Hydra++"),
    DrafterFormat(
        "AMD, PARD-2",
        "`pard2_target_layers`",
        _has("pard2_target_layers"),
        "draft_model",
        "in the mode without the target's states, whose projection is a pickle",
    ),
    DrafterFormat("AMD, PARD", "`pard_token`, or `ptd_token_id`", _has(*MASK_ENTRIES), "draft_model"),
    DrafterFormat(
        "vLLM, prediction layers as a folder of their own",
        "`model_type` ends in `_mtp`",
        _mtp,
        reason="prediction layers are read from the checkpoint that they were published in",
        remedy="mtp, with that checkpoint",
    ),
    DrafterFormat(
        "SafeAILab, EAGLE-3",
        "`draft_vocab_size`, or `eagle_config`",
        lambda config: _has("draft_vocab_size", "eagle_config")(config) or _architecture("Eagle3")(config),
        "eagle",
    ),
)
# An EAGLE-1's config.json is that of its layers, as a draft model's is, so it cannot be told from one.
UNTOLD = (
    ("SafeAILab, EAGLE-1", "the entries of a Llama", "eagle"),
    ("any language model of text", "the entries of a family", "draft_model"),
    ("prediction layers in the target's checkpoint", "the target's own", "mtp"),
)


def format_of(config: Config) -> DrafterFormat | None:
    """The format that a config.json shows; None if it shows none of those known."""
    return next((one for one in FORMATS if one.known(config)), None)


def check_format(config: Config, folder: str | Path, method: str) -> None:
    """Refuse a folder of a format that a drafter does not read.

    Raises:
        OutpaceError: the message names the format, and what reads it or what to use in its place.
    """
    found = format_of(config)
    if found is None or "method" in config or found.drafter == method:
        return
    what = f"{method}: {folder} has the format {found.name}"
    if kind := config.get("speculators_model_type"):
        what += f" (kind {kind!r})"
    if found.drafter:
        raise OutpaceError(f"{what}, which the drafter {found.drafter} reads: {found.drafter}:path={folder}")
    raise OutpaceError(f"{what}, which is not read: {found.reason}; use {found.remedy}")
