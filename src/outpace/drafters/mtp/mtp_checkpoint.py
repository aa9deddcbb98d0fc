"""Prediction layers in a checkpoint: which layout it has, and the layers with their weights.

transformers builds them and converts their weights, for the families that it knows (``MtpModel``). Here is
what it lacks: layouts that it ignores, any number of layers before them, checks of what is there.

Layouts. A layer is a decoder layer of the family with norms of the token's embedding and of the hidden state
before it, a projection of both, and a norm after it.

- ``model.layers.N`` after the last layer, with ``eh_proj``: DeepSeek-V3, GLM-4.5, Ling 2.5.
  (Step 3.7 is published with heads in them, which nothing here computes.)
- ``mtp.fc`` with ``mtp.layers.0``: Qwen3-Next, Qwen3.5, Mellum.
- ``model.mtp.layers.N``: MiMo-V2. Each of its layers reads the target's state, by SGLang's implementation
  (``multi_layer_eagle_worker_v2.py``); elsewhere a layer reads the output of the one before.
- ``mtp_layers.0``: one layer in a folder of its own, trained by vllm-project/speculators.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from outpace.core import OutpaceError, UnsupportedModel, first_line
from outpace.learned.folder import read_config
from outpace.learned.published import config_of, find
from outpace.targets.base import TargetModel
from outpace.targets.inputs.config import family
from outpace.targets.inputs.masks import unknown_kinds
from outpace.targets.weights.checkpoint import FLOATS, INDEX, WEIGHTS, header, weight_files

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PROJECTION = re.compile(r"\.(?:eh_proj|fc)\.")
_TABLE = r"(?:.*\.)?(?:d2t|t2d)"  # of drafted ids, as EAGLE-3 has
_HEAD = ".shared_head.output."  # as Step 3.5 and 3.7 are published
_SPECULATORS = {
    r"mtp_layers\.0\.input_proj\.": "mtp.fc.",
    r"mtp_layers\.0\.token_layernorm\.": "mtp.pre_fc_norm_embedding.",
    r"mtp_layers\.0\.hidden_layernorm\.": "mtp.pre_fc_norm_hidden.",
    r"mtp_layers\.0\.final_layernorm\.": "mtp.norm.",
    r"mtp_layers\.0\.": "mtp.layers.0.",
}
_OTHER = "; use a drafter that needs no layers, as suffix"


@dataclass(frozen=True)
class PredictionLayout:
    """How a checkpoint names its prediction layers.

    Attributes:
        pattern: of the names of their tensors; the first group is the number of a layer.
        chained: a layer reads the output of the one before, not the target's state.
        kind: attention of the layers, where neither the config nor the family names it.
        mlp: their feed-forward part, where neither names it.
        renamed: parts of names -> those by which a family publishes them.
    """

    pattern: str
    chained: bool = True
    kind: str = _FULL
    mlp: str = "sparse"
    renamed: Mapping[str, str] = field(default_factory=dict)


def layouts(layers: int) -> list[PredictionLayout]:
    stem = rf"^(?!{_TABLE}$)(?:model\.)?(?:language_model\.)?(?:model\.)?"
    return [
        PredictionLayout(rf"{stem}layers\.({'|'.join(str(layers + more) for more in range(64))})\."),
        PredictionLayout(r"^mtp\.(?:layers\.(\d+)\.|(?:fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.)"),
        PredictionLayout(rf"{stem}mtp\.layers\.(\d+)\.", chained=False, kind=_SLIDING, mlp="dense"),
        PredictionLayout(r"^mtp_layers\.(0)\.", renamed=_SPECULATORS),
    ]


def has_layers(model: Any, folder: Path) -> bool:
    """Whether a folder has prediction layers for a model, by the names of its tensors.

    Layers beyond the model's last one count only if they have a projection of two states.
    """
    config = getattr(model, "config", None)
    layers = getattr(config and config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(layers, int):
        return False
    names = [name for file in weight_files(folder) for name in header(file)]
    patterns = [re.compile(layout.pattern) for layout in layouts(layers)]
    return any(_PROJECTION.search(name) and any(one.match(name) for one in patterns) for name in names)


@dataclass(frozen=True)
class Found:
    """Prediction layers with their weights.

    Attributes:
        layers: transformers' modules, each with the norms around it.
        config: of these layers.
        chained: see ``PredictionLayout``.
        tables: of the ids that are drafted, by name; empty for all.
        rotary: the target's position embeddings; None if it has none.
        by_kind: these depend on the kind of layer.
        stock: transformers' module of all layers.
        names: of the layers' tensors in the checkpoint.
    """

    layers: nn.ModuleList
    config: Any
    chained: bool
    tables: Mapping[str, Tensor]
    rotary: Any
    by_kind: bool
    stock: Any
    names: frozenset[str]


def load(target: TargetModel, path: Any) -> Found:
    """The prediction layers in a folder, in the target's dtype and device.

    Args:
        path: a folder; None is that of the target's own checkpoint.

    Raises:
        OutpaceError: there are none, too many, too few, quantised ones, or ones with heads; a tensor is
            missing, superfluous or of the wrong shape; or transformers is too old. UnsupportedModel: they
            keep a recurrent state.
    """
    model = _model_of(target)
    folder = _folder(model, path)
    if "method" in config_of(folder):  # written by training: that both files are whole
        read_config(folder, "mtp")
    config = model.config.get_text_config(decoder=True)
    kinds = {name: kind for file in weight_files(folder) for name, kind in header(file).items()}
    for layout in layouts(config.num_hidden_layers):
        own = {name: kind for name, kind in kinds.items() if re.match(layout.pattern, name)}
        if own:
            break
    else:
        raise OutpaceError(f"mtp: {folder} has no multi-token prediction layers{_OTHER}")
    for name, kind in own.items():
        if kind not in FLOATS:
            raise OutpaceError(
                f"mtp: {name} in {folder} is quantised, to {kind}; give path, the folder of the same layers "
                "in bfloat16"
            )
        if _HEAD in name:
            raise OutpaceError(
                f"mtp: the prediction layers in {folder} have heads of their own, as {name}; mtp uses the "
                f"target's, as transformers does{_OTHER}"
            )
    numbers = {re.match(layout.pattern, name)[1] for name in own} - {None}  # type: ignore[index]
    made = _config(config, layout, _count(config, len(numbers), folder))
    if unknown := unknown_kinds(made):
        raise UnsupportedModel(
            f"{family(model)}: its prediction layers are of the kind {unknown[0]}, which keeps a state "
            f"beside keys and values{_OTHER}"
        )
    stock = _loaded(model, made, layout, folder)
    layers = stock.layers.requires_grad_(False).eval()
    layers = layers.to(device=target.hidden.device, dtype=target.hidden.dtype)
    tables = _tables(folder)
    rotary = stock.rotary_emb, stock.has_per_layer_rope
    return Found(layers, made, layout.chained, tables, *rotary, stock, frozenset(own))


def published(found: Found, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the layers, by transformers' names, in the form and by the names of their checkpoint.

    Raises:
        OutpaceError: transformers cannot undo its conversions.
    """
    from transformers.core_model_loading import revert_weight_conversion

    reverted = revert_weight_conversion(found.stock, dict(tensors))
    # transformers leaves the end of a pattern that looks ahead in the names that it undoes.
    made = {re.sub(r"\.\.[.)]*", ".", name): tensor for name, tensor in reverted.items()}
    if strange := sorted(made.keys() - found.names):
        raise OutpaceError(
            f"mtp: layers of this family cannot be written as they were published: {strange[0]} is not in "
            "the checkpoint; train eagle, which reads the same states"
        )
    return made


def _tables(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in weight_files(folder):
        if names := [name for name in header(file) if re.fullmatch(_TABLE, name)]:
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names}
    return found


def _model_of(target: TargetModel) -> Any:
    """The target's transformers model, if prediction layers can be made for it."""
    model = target.model
    if model is None or not hasattr(model, "get_decoder") or target.has_encoder:
        raise OutpaceError(
            f"mtp: {target.name} is no decoder-only transformers model, so its checkpoint has no layers that "
            f"can be read{_OTHER}"
        )
    import transformers
    from transformers import modeling_layers

    if not hasattr(modeling_layers, "MtpModel"):
        raise OutpaceError(
            f"mtp: it needs transformers 5.24 or later, and this is {transformers.__version__}; update it"
        )
    return model


def _folder(model: Any, path: Any) -> Path:
    """The folder of a checkpoint: the given one, or that which a model was loaded from."""
    name = str(model.name_or_path if path is None else path)
    if not name:
        raise OutpaceError("mtp: this model was not loaded from a folder; give path, that of its checkpoint")
    if Path(name).is_dir():
        return Path(name)
    if path is not None:
        return find(name, "mtp")
    from transformers.utils.hub import cached_file

    revision = getattr(model.config, "_commit_hash", None)
    for file in (INDEX, WEIGHTS):
        try:
            found = cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False)
        except (OSError, ValueError) as error:
            raise OutpaceError(f"mtp: no folder or model {name}: {first_line(error)}") from error
        if found is not None:
            return Path(found).parent
    raise OutpaceError(f"mtp: {name} has no weights in safetensors format; give path, a folder with them")


def _count(config: Any, found: int, folder: Path) -> int:
    """The number of layers, compared with the config's."""
    for name in ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
        told = getattr(config, name, None)
        if isinstance(told, int) and told and told != found:
            raise OutpaceError(
                f"mtp: {folder} has {found} prediction layers, but {name} in the model's config is {told}; "
                "fetch the checkpoint again"
            )
    return found


def _config(config: Any, layout: PredictionLayout, count: int) -> Any:
    """The config of the prediction layers: the family's own, with the kinds of these layers."""
    made = copy.deepcopy(config)
    made.num_mtp_layers = count
    for name, kind in (("layer_types", layout.kind), ("mlp_layer_types", layout.mlp)):
        listed = getattr(made, name, None)
        if listed and not getattr(made, f"mtp_{name}", None):
            setattr(made, f"mtp_{name}", [kind] * count)
    attention = config._attn_implementation
    made = made.get_mtp_config()
    made._attn_implementation = attention if attention in ("eager", "sdpa") else "sdpa"
    return made


def _loaded(model: Any, config: Any, layout: PredictionLayout, folder: Path) -> Any:
    """transformers' ``MtpModel`` with a folder's weights, without the parts it shares with the target."""
    from transformers import modeling_layers
    from transformers.core_model_loading import WeightRenaming

    class MtpModel(modeling_layers.MtpModel):
        """transformers' own, by whose name the conversions of weights are found."""

        @classmethod
        def is_custom_code(cls) -> bool:
            return False

        def get_weight_conversions(self, main_model: Any) -> list[Any]:
            names = {"final_layernorm": "post_norm", "pre_mlp_layernorm": "post_attention_layernorm"}
            every = {**layout.renamed, **{rf"\.{old}\.": f".{new}." for old, new in names.items()}}
            own = [WeightRenaming(old, new) for old, new in every.items()]
            return [*own, *super().get_weight_conversions(main_model)]

        def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
            super()._adjust_missing_and_unexpected_keys(loading_info)
            wrong = {
                "is missing": loading_info.missing_keys,
                "is not expected": loading_info.unexpected_keys,
                "has another shape": {name for name, *_ in loading_info.mismatched_keys},
            }
            for what, names in wrong.items():
                if names:
                    raise OutpaceError(f"mtp: tensor {min(names)!r} of the layers in {folder} {what}")

    return MtpModel.from_pretrained(_stand_in(model, config, layout, folder))


def _stand_in(model: Any, config: Any, layout: PredictionLayout, folder: Path) -> Any:
    """What ``MtpModel`` reads of a model, so that the user's is unchanged.

    The embeddings and the head are left out: prediction layers use the target's.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    text, decoder = model.config.get_text_config(decoder=True), model.get_decoder()
    kinds = getattr(text, "layer_types", None) or [_FULL] * len(decoder.layers)
    attends = [layer for layer, kind in zip(decoder.layers, kinds, strict=True) if kind in (_FULL, _SLIDING)]
    about = SimpleNamespace(
        name_or_path=str(folder),
        dtype=model.dtype,
        num_hidden_layers=text.num_hidden_layers,
        num_mtp_layers=config.num_hidden_layers,
        get_mtp_config=lambda: config,
    )
    about.get_text_config = lambda: about
    return SimpleNamespace(
        config=about,
        _keys_to_ignore_on_load_unexpected=[layout.pattern],
        # As the family's weights are published, without what quantised them on loading.
        _weight_conversions=get_model_conversion_mapping(model),
        lm_head=nn.Identity(),
        get_input_embeddings=nn.Identity,
        get_decoder=lambda: SimpleNamespace(
            layers=attends[-1:] or decoder.layers, rotary_emb=getattr(decoder, "rotary_emb", None)
        ),
    )
