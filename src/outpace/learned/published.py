"""Published EAGLE drafters: the formats of vllm-project/speculators and SafeAILab/EAGLE.

What other published drafters need too is public here. All are a config.json and safetensors. Both formats of
an EAGLE-3 have the same tensors under nearly the same names; an EAGLE-1 has one layer without its first norm,
``fc``, and perhaps embeddings. In an EAGLE-3, ``d2t[i]`` is the offset to add to draft id i to get the
target's id, not that id itself, and ``t2d`` is true for each of the target's ids that is drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outpace.core import OutpaceError, first_line
from outpace.files import check_plain, read_json
from outpace.hub import drafter_folder, source
from outpace.learned.formats import check_format
from outpace.names import is_gguf
from outpace.targets.weights.checkpoint import check_counts

# SafeAILab's name of the one layer, and that of speculators.
_THEIRS, _OURS = "midlayer.", "layers.0."
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def find(given: str | Path, method: str = "eagle") -> Path:
    """The folder of a drafter: the given one or, if it does not exist, the hub's of that name.

    Only config.json, its like, and safetensors are fetched. See ``outpace.hub.drafter_folder``.

    Raises:
        OutpaceError: there is no such folder, the hub has none of that name or cannot be reached, or it has a
            format that the drafter does not read.
    """
    path = drafter_folder(given, method)
    check_format(config_of(path), path, method)
    return path


def find_model(given: str | Path, method: str) -> str | Path:
    """What transformers or llama.cpp loads for the name of a draft model, whose revision may be in the name.

    Raises:
        OutpaceError: as ``find``.
    """
    if is_gguf(given):
        return given
    # transformers takes a revision apart from the name.
    if "@" in str(given):
        place: str | Path = drafter_folder(given, method, tokenizer=True)
    else:
        place = given if Path(given).exists() else source(str(given))
    check_format(config_of(place), place, method)
    return place


def config_of(folder: str | Path) -> dict[str, Any]:
    """The config.json of a folder; empty if there is none or it is not a JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = read_json(path)
    except OutpaceError:
        return {}  # the reader of outpace's own format then reports the error
    return config if isinstance(config, dict) else {}


def tensors_of(files: Seq[Path], method: str) -> dict[str, Tensor]:
    """All tensors of safetensors files.

    Raises:
        OutpaceError: a file cannot be read.
    """
    found: dict[str, Tensor] = {}
    for file in files:
        check_plain(file)
        try:
            found |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise OutpaceError(f"{method}: {file} cannot be read: {error}") from error
    return found


def read(folder: str | Path) -> dict[str, Any] | None:
    """The config.json of a published EAGLE drafter, in any layout; None for anything else."""
    config = config_of(folder)
    if "method" in config:
        return None
    return config if {"speculators_model_type", "num_hidden_layers"} & config.keys() else None


def version_of(config: Mapping[str, Any]) -> int:
    """EAGLE's version of a published drafter. The config of an EAGLE-1 is that of its layers and no more."""
    return 3 if "speculators_model_type" in config or "draft_vocab_size" in config else 1


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """The drafter's tensors, by speculators' names.

    Raises:
        OutpaceError: there are no safetensors, or they cannot be read.
    """
    return {
        _OURS + name.removeprefix(_THEIRS) if name.startswith(_THEIRS) else name: tensor
        for name, tensor in all_tensors(folder, "eagle").items()
    }


def all_tensors(folder: str | Path, method: str) -> dict[str, Tensor]:
    """The tensors of all safetensors files in a folder.

    Raises:
        OutpaceError: there are none, or they cannot be read.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise OutpaceError(
            f"{method}: there are no safetensors in {folder}; convert weights of another format to "
            "model.safetensors"
        )
    return tensors_of(files, method)


def head_tensors(folder: str | Path, file: str, method: str, prefix: str) -> dict[str, Tensor]:
    """The tensors of published heads: those of ``file``.safetensors, otherwise of all safetensors.

    Args:
        prefix: of their names in the checkpoint of a whole model; removed.

    Raises:
        OutpaceError: there is only a pickle, or a file cannot be read.
    """
    place = Path(folder)
    files = [place / f"{file}.safetensors"]
    if not files[0].is_file():
        files = sorted(place.glob("*.safetensors"))
    if not files and (place / f"{file}.pt").is_file():
        raise OutpaceError(
            f"{method}: {place / file}.pt is a pickle, which is not read; convert it once: safetensors.torch."
            f"save_file({{k: v.clone() for k, v in torch.load('{file}.pt', weights_only=True).items()}}, "
            f"'{file}.safetensors')"
        )
    found = tensors_of(files, method)
    return {name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)} or found


def named_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The target's layers that the drafter reads, from its config; None if it names none."""
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(key) or (config.get("eagle_config") or {}).get(key)
    return tuple(layers) if layers else None


def target_of(config: Mapping[str, Any]) -> str:
    """The name of the target, if the config has it."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or "the target of its config.json")


def read_config(
    config: Mapping[str, Any], layers: Seq[int], folder: str | Path, method: str = "eagle"
) -> dict[str, Any]:
    """The fields of an EagleConfig, and the vocabulary, from the config.json of a published drafter.

    Args:
        layers: the target's layers that are read.
        method: "eagle", or "peagle", whose files differ by the masked places' parts alone.

    Raises:
        OutpaceError: it is of another method, or has unknown parts.
    """
    known = "eagle3" if method == "eagle" else method
    version, kind = version_of(config), config.get("speculators_model_type", known)
    if kind != known:
        raise OutpaceError(f"{method}: {folder} contains a drafter of kind {kind!r}; only {known} is read")
    inner = layer_of(config.get("transformer_layer_config", config), folder, method)
    if config.get("target_hidden_size") not in (None, inner.hidden_size):
        raise OutpaceError(
            f"{method}: the drafter in {folder} has a hidden size of {inner.hidden_size} and its target of "
            f"{config['target_hidden_size']}; they must be equal"
        )
    drafted = config.get("draft_vocab_size") or inner.vocab_size
    if drafted > inner.vocab_size:
        raise OutpaceError(
            f"{method}: the drafter in {folder} has a draft_vocab_size of {drafted} and a vocab_size of "
            f"{inner.vocab_size}; it cannot draft more ids than there are"
        )
    several = "transformer_layer_config" in config or version == 1 or method == "peagle"
    depth = inner.num_hidden_layers if several else 1
    check_attention(inner, depth, folder, method)
    nested = config.get("eagle_config") or {}
    return {
        "version": version,
        "layers": (-1,) if version == 1 else tuple(layers),
        "depth": depth,
        "vocabulary": inner.vocab_size,
        "draft_vocabulary": drafted,
        "steps": _steps(config) if version == 3 else 1,
        "own_head": version == 3,
        **{name: bool(config.get(name, nested.get(name, False))) for name in NORMS},
        **sizes_of(inner),
    }


def sizes_of(layer: Any) -> dict[str, Any]:
    """The fields of a LayerConfig from transformers' config of a layer."""
    heads = layer.num_attention_heads
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "heads": heads,
        "kv_heads": layer.num_key_value_heads or heads,
        "head_size": getattr(layer, "head_dim", None) or 0,
        "eps": layer.rms_norm_eps,
        "bias": bool(getattr(layer, "attention_bias", False)),
        "rope": dict(layer.rope_parameters),
        "context": layer.max_position_embeddings,
    }


def check_attention(
    layer: Any, depth: int, folder: str | Path, method: str, known: Seq[str] = ("full_attention",)
) -> None:
    """Check that every layer has a known kind of attention.

    Raises:
        OutpaceError: a layer has another kind.
    """
    kinds = set((getattr(layer, "layer_types", None) or ())[:depth]) - {*known}
    if kinds:
        raise OutpaceError(
            f"{method}: a layer of the drafter in {folder} has {kinds.pop()!r}; only {' and '.join(known)} "
            f"{'is' if len(known) == 1 else 'are'} supported"
        )


def _steps(config: Mapping[str, Any]) -> int:
    """Number of tokens that the drafter is meant to draft per step."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or 5)


def layer_of(given: Mapping[str, Any], folder: str | Path, method: str) -> Any:
    """The config of a drafter's layers. Published files omit their family's defaults.

    Raises:
        OutpaceError: transformers cannot read it, or the activation is not SiLU.
    """
    from transformers import AutoConfig

    check_counts(given, f"{method}: config.json in {folder}")
    known = {key: value for key, value in given.items() if key not in ("model_type", "auto_map")}
    try:
        layer = AutoConfig.for_model(given.get("model_type", "llama"), **known)
    except Exception as error:  # a config of any family, with any entries
        raise OutpaceError(
            f"{method}: transformers cannot read config.json in {folder}: {first_line(error)}"
        ) from error
    if layer.hidden_act != "silu":
        raise OutpaceError(f"{method}: {folder} has hidden_act {layer.hidden_act!r}; only silu is supported")
    return layer
