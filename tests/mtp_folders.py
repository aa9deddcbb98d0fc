"""Tiny checkpoints with prediction layers, in the layouts in which families publish them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SIZE, VOCABULARY = 32, 61
WEIGHTS = "model.safetensors"
_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_QWEN: Mapping[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
# The names of the parts around a layer: norms of the embedding and of the state, projection, norm after it.
Names = tuple[str, str, str, str]
_DEEPSEEK: Names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True)
class Family:
    """A family's shape, and how it names prediction layers.

    Attributes:
        inner, outer: the names of a layer's tensors and of the parts around it, with {k} for its number and
            {n} for the number of the model's layers.
        names: of the parts around it.
        like: number of the model's layer whose tensors a prediction layer has.
        ones: a norm's neutral weight.
        renamed: other names of a layer's tensors.
        told: the config's entry for the number of layers.
        padded: the config's lists that have an entry for each prediction layer too, and that entry.
        inside: the shape is that of the text's config in one that has images' beside it.
    """

    shape: Mapping[str, Any]
    inner: str
    outer: str
    names: Names
    like: int = -1
    ones: float = 1.0
    renamed: Mapping[str, str] = field(default_factory=dict)
    told: str = ""
    padded: Mapping[str, str] = field(default_factory=dict)
    inside: bool = False


FAMILIES: dict[str, Family] = {
    "glm4_moe": Family(
        {**_EXPERTS, "num_hidden_layers": 2, "first_k_dense_replace": 1},
        "model.layers.{n}.", "model.layers.{n}.", _DEEPSEEK, told="num_nextn_predict_layers",
    ),
    "deepseek_v3": Family(
        {**_EXPERTS, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
         "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "v_head_dim": 12},
        "model.layers.{n}.", "model.layers.{n}.", _DEEPSEEK, told="num_nextn_predict_layers",
    ),
    "mellum": Family(
        {**_EXPERTS, "num_hidden_layers": 2, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"]},
        "mtp.layers.{k}.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        told="num_nextn_predict_layers",
    ),
    "qwen3_next": Family(
        {**_EXPERTS, **_QWEN, "num_hidden_layers": 2, "shared_expert_intermediate_size": 24,
         "layer_types": ["linear_attention", "full_attention"]},
        "mtp.layers.{k}.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), ones=0.0,
    ),
    "qwen3_5_text": Family(
        {**_QWEN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "mtp.layers.{k}.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), ones=0.0,
    ),
    "qwen3_5_moe_text": Family(
        {**_EXPERTS, **_QWEN, "num_hidden_layers": 2, "shared_expert_intermediate_size": 24,
         "layer_types": ["linear_attention", "full_attention"]},
        "mtp.layers.{k}.", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), ones=0.0,
    ),
    "bailing_hybrid": Family(
        {**_EXPERTS, "num_hidden_layers": 2, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "linear_head_dim": 8,
         "linear_num_heads": 4, "num_expert_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
         "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
        "model.layers.{n}.", "model.layers.{n}.", ("enorm", "hnorm", "eh_proj", "final_layernorm"),
        told="num_nextn_predict_layers",
    ),
    "mimo_v2_flash": Family(
        {**_EXPERTS, "num_hidden_layers": 3, "v_head_dim": 6, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention", "full_attention"],
         "mlp_layer_types": ["dense"] * 3},
        "model.mtp.layers.{k}.", "model.mtp.layers.{k}.", ("enorm", "hnorm", "eh_proj", "final_layernorm"),
        like=1, renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
    ),
    "step3p7": Family(
        {**_EXPERTS, "num_hidden_layers": 2, "share_expert_dim": 24, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["sparse", "dense"]},
        "model.layers.{n}.", "model.layers.{n}.", _DEEPSEEK, ones=0.0,
        told="num_nextn_predict_layers", inside=True,
        padded={"layer_types": "sliding_attention", "mlp_layer_types": "dense"},
    ),
}  # fmt: skip


def write(
    folder: Path,
    name: str,
    layers: int = 1,
    change: Callable[[dict[str, Tensor]], None] | None = None,
    attention: float = 1.0,
) -> Path:
    """Write a random checkpoint whose greedy text its prediction layers often guess.

    Token and next token are a bigram model's, disturbed by the layers, so that a prediction depends on all
    that a layer reads and is right now and then.

    Args:
        change: changes the tensors before they are written.
        attention: factor of the matrices of the layers' attention. With 4 hardly a token is guessed, and each
            depends on every row that is attended to.
    """
    family = FAMILIES[name]
    torch.manual_seed(0)
    shape = {**_COMMON, **family.shape}
    entries = {"text_config": shape, "vision_config": _VISION} if family.inside else shape
    config = AutoConfig.for_model(name, **entries)
    model = _auto(config).from_config(config).float().eval()
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "embed" in label or "lm_head" in label else 0.12)
            elif "norm" in label:
                weight.add_(torch.randn_like(weight) * 0.2)
            else:
                weight.normal_(std=0.1)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    state = _one_by_one(load_file(folder / WEIGHTS))
    count = config.get_text_config().num_hidden_layers
    source = f"model.layers.{family.like % count}."
    for layer in range(layers):
        inner, outer = (form.format(k=layer, n=count + layer) for form in (family.inner, family.outer))
        for label in [one for one in state if one.startswith(source)]:
            rest = label.removeprefix(source)
            for old, new in family.renamed.items():
                rest = rest.replace(old, new)
            scale = attention if re.search(r"self_attn\.\w+_proj", label) else 1.0
            state[inner + rest] = scale * (state[label] + 0.03 * torch.randn_like(state[label]))
        embedding, hidden, projection, after = (f"{outer}{part}.weight" for part in family.names)
        for norm in (embedding, hidden, after):
            state[norm] = family.ones + 0.2 * torch.randn(SIZE)
        state[projection] = torch.cat([torch.eye(SIZE), 0.4 * torch.eye(SIZE)], dim=1)
        state[projection] += 0.1 * torch.randn_like(state[projection])
    if name in ("glm4_moe", "deepseek_v3"):  # which publish their embeddings and head once more
        state[f"model.layers.{count}.embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"model.layers.{count}.shared_head.head.weight"] = state["lm_head.weight"].clone()
    if change is not None:
        change(state)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    if family.told:
        file = folder / "config.json"
        told = json.loads(file.read_text("utf-8"))
        text = told["text_config"] if family.inside else told
        text[family.told] = layers
        for label, kind in family.padded.items():
            text[label] += [kind] * layers
        file.write_text(json.dumps(told), "utf-8")
    return folder


def _auto(config: Any) -> Any:
    """The class that loads a model of this config."""
    return AutoModelForCausalLM if config is config.get_text_config() else AutoModelForImageTextToText


def _one_by_one(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with each expert's matrices for themselves, as they are published."""
    found = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if not stem.endswith(".experts"):
            found[name] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, matrix in enumerate(tensor):
            for part, own in zip(kinds, matrix.chunk(len(kinds)), strict=True):
                found[f"{stem}.{expert}.{part}.weight"] = own.clone()
    return found


def shard(folder: Path) -> None:
    """Write a checkpoint's tensors in two files with an index, the prediction layers in the second."""
    state = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    second = [name for name in state if re.search(r"(^|\.)mtp\.|\.layers\.2\.", name)]
    parts = {
        "model-1.safetensors": [name for name in state if name not in second],
        "model-2.safetensors": second,
    }
    for file, names in parts.items():
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), "utf-8")


@torch.no_grad()
def write_beside(folder: Path, model: Any, texts: Sequence[Sequence[int]]) -> Path:
    """Write a prediction layer for a Llama that has none, in Qwen's layout.

    Its projection is the linear map of embedding and state that predicts the next state of the texts best;
    the layer after it is the model's last one, weakened.
    """
    base, size = model.model, model.config.hidden_size
    reads, states = [], []
    for text in texts:
        ids = torch.tensor([text])
        found = base(ids)[0][0].double()
        embedded = base.embed_tokens(ids)[0].double()
        rows = [F.rms_norm(part, (size,)) for part in (embedded[1:], found[:-1])]
        reads.append(torch.cat(rows, dim=-1))
        states.append(found[1:] / base.norm.weight.double())
    fitted = torch.linalg.lstsq(torch.cat(reads), torch.cat(states), driver="gelsd").solution
    ones = torch.ones(size)
    state = {
        "mtp.fc.weight": fitted.T.float().contiguous(),
        "mtp.pre_fc_norm_embedding.weight": ones,
        "mtp.pre_fc_norm_hidden.weight": ones.clone(),
        "mtp.norm.weight": base.norm.weight.float().clone(),
    }
    for name, weight in base.layers[-1].state_dict().items():
        branch = name.endswith(("o_proj.weight", "down_proj.weight"))
        state[f"mtp.layers.0.{name}"] = weight.float() * (0.1 if branch else 1.0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def load(folder: Path) -> Any:
    auto = _auto(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32).eval()
