"""DFlash as published, by z-lab and in speculators' layout: its drafts, and invalid files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from models import tiny_llama
from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.engine.engine import Engine
from outpace.targets import Target, TargetModel
from outpace.tree import path_to
from watching import Watch

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
SIZE, HEADS, KEY_HEADS, HEAD, DEPTH, BLOCK, MASK, THETA, EPS = 32, 4, 2, 8, 2, 6, 96, 5000.0, 1e-5
READ = (0, 2, 3)  # layers as z-lab counts them; the last is the last of the target
LAYER = {
    "model_type": "qwen3",
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "vocab_size": 97,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 256,
}
ZLAB = {
    **LAYER,
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": BLOCK,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(READ)},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "draft_vocab_size": 97,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "aux_hidden_state_layer_ids": [1, 3],
    "transformer_layer_config": LAYER,
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    },
}


@lru_cache
def llama() -> TargetModel:
    return Target(tiny_llama(layers=4))


def weights(read: int = len(READ)) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = {"fc.weight": (SIZE, read * SIZE), "hidden_norm.weight": (SIZE,), "norm.weight": (SIZE,)}
    for layer in range(DEPTH):
        at = f"layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (SIZE,),
            at + "post_attention_layernorm.weight": (SIZE,),
            at + "self_attn.q_proj.weight": (HEADS * HEAD, SIZE),
            at + "self_attn.k_proj.weight": (KEY_HEADS * HEAD, SIZE),
            at + "self_attn.v_proj.weight": (KEY_HEADS * HEAD, SIZE),
            at + "self_attn.o_proj.weight": (SIZE, HEADS * HEAD),
            at + "self_attn.q_norm.weight": (HEAD,),
            at + "self_attn.k_norm.weight": (HEAD,),
            at + "mlp.gate_proj.weight": (64, SIZE),
            at + "mlp.up_proj.weight": (64, SIZE),
            at + "mlp.down_proj.weight": (SIZE, 64),
        }
    return {name: torch.randn(shape, generator=random) / 2 for name, shape in shapes.items()}


def copies() -> dict[str, Tensor]:
    """The tensors of the target that speculators' files repeat."""
    model: Any = llama().model
    return {
        "embed_tokens.weight": model.model.embed_tokens.weight.float().detach().clone(),
        "lm_head.weight": model.lm_head.weight.float().detach().clone(),
        "verifier_lm_head.weight": model.lm_head.weight.float().detach().clone(),
        "verifier_norm.weight": model.model.norm.weight.float().detach().clone(),
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def plainly(text: list[int], root: int, tensors: dict[str, Tensor]) -> list[int]:
    """The draft after a text and its root, computed row by row, without a cache."""
    model: Any = llama().model
    with torch.no_grad():
        chosen: list[int] = model.lm_head(outputs(text, root, tensors)[1:]).argmax(-1).tolist()
    return chosen


def outputs(
    text: list[int],
    root: int,
    tensors: dict[str, Tensor],
    width: int = BLOCK,
    causal: bool = False,
    convolved: Callable[[str, int, Tensor, Tensor], Tensor] = lambda name, side, before, rows: rows,
    scale: float = 1.0,
) -> Tensor:
    """The normalised outputs of a block's rows, [width, size], computed row by row.

    Args:
        causal: rows do not attend to later ones.
        convolved: rows of a part of a layer, named with its layer, before it (side 0) and after it (side 1),
            from the layer's rows before the part, and the rows themselves.
        scale: of the embeddings.
    """
    model: Any = llama().model
    own = {name: tensor.double() for name, tensor in tensors.items() if tensor.is_floating_point()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * own[name + ".weight"]

    def turned(x: Tensor, place: int) -> Tensor:
        angles = place * THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
        cos, sin = (part.repeat(2) for part in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], dim=-1) * sin

    def attended(at: str, x: Tensor) -> Tensor:
        rows = torch.cat([context, x])
        keys = norm((rows @ own[at + "k_proj.weight"].T).view(-1, KEY_HEADS, HEAD), at + "k_norm")
        values = (rows @ own[at + "v_proj.weight"].T).view(-1, KEY_HEADS, HEAD)
        queries = norm((x @ own[at + "q_proj.weight"].T).view(-1, HEADS, HEAD), at + "q_norm")
        keys = torch.stack([turned(key, place) for place, key in enumerate(keys)])
        seen = []
        for row, query in enumerate(queries):
            query, end = turned(query, len(text) + row), len(text) + (row + 1 if causal else width)
            for head in range(HEADS):
                group = head // (HEADS // KEY_HEADS)
                shares = (keys[:end, group] @ query[head] / HEAD**0.5).softmax(0)
                seen.append(shares @ values[:end, group])
        return torch.cat(seen).view(width, -1) @ own[at + "o_proj.weight"].T

    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        joined = torch.cat([states[layer + 1][0] for layer in READ], dim=-1)
        context = norm(joined @ own["fc.weight"].T, "hidden_norm")
        block = scale * model.model.embed_tokens(torch.tensor([root] + [MASK] * (width - 1)))
        for layer in range(DEPTH):
            at = f"layers.{layer}."
            x = norm(block, at + "input_layernorm")
            seen = attended(at + "self_attn.", convolved(at + "attention_conv.", 0, x, x))
            block = block + convolved(at + "attention_conv.", 1, x, seen)
            x = norm(block, at + "post_attention_layernorm")
            mlp = {part: own[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down")}
            y = convolved(at + "mlp_conv.", 0, x, x)
            y = (F.silu(y @ mlp["gate"].T) * (y @ mlp["up"].T)) @ mlp["down"].T
            block = block + convolved(at + "mlp_conv.", 1, x, y)
        return norm(block, "norm")


def test_a_draft_is_that_of_a_plain_computation(tmp_path: Path) -> None:
    tensors = weights()
    watch = Watch()
    drafter = DFlash(str(write(tmp_path, ZLAB, tensors)), draws="greedy", max_nodes=0)
    engine = Engine(llama(), drafter, adaptive=False, observer=watch)
    (found,) = engine.generate([PROMPTS[1]], PARAMS)
    text = list(PROMPTS[1])
    emitted = found.tokens[:]
    compared = 0
    for step in watch.steps:
        if step.draft.tokens and len(step.draft) == BLOCK - 1:
            assert list(step.draft.tokens) == plainly(text[:-1], text[-1], tensors)
            compared += 1
        text += step.tokens
    assert text == PROMPTS[1] + emitted and compared >= 3


def test_a_tree_has_the_most_probable_paths(tmp_path: Path) -> None:
    """Chances are products of the probabilities at the places; none outside is above one inside."""
    tensors, watch, nodes = weights(), Watch(), 12
    drafter = DFlash(str(write(tmp_path, ZLAB, tensors)), max_nodes=nodes)
    Engine(llama(), drafter, adaptive=False, observer=watch).generate([PROMPTS[1]], PARAMS)
    text, compared, model = list(PROMPTS[1]), 0, llama().model
    for step in watch.steps:
        draft = step.draft
        if len(draft) == nodes:
            with torch.no_grad():
                places = model.lm_head(outputs(text[:-1], text[-1], tensors)[1:]).softmax(-1)  # type: ignore[union-attr]
            inside = {(): 1.0}
            for node, chance in enumerate(draft.chances or ()):
                path = tuple(draft.tokens[one] for one in path_to(draft.parents, node))
                inside[path] = math.prod(float(places[place, token]) for place, token in enumerate(path))
                assert chance == pytest.approx(inside[path])
            outside = max(
                own * float(one)
                for path, own in inside.items()
                if len(path) < len(places)
                for token, one in enumerate(places[len(path)])
                if (*path, token) not in inside
            )
            assert len(inside) == nodes + 1 and outside <= min(inside.values()) * (1 + 1e-9)
            compared += 1
        text += step.tokens
    assert compared >= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["z-lab", "nested", "speculators", "speculators with copies"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, layout: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    config: dict[str, Any] = SPECULATORS if "speculators" in layout else dict(ZLAB)
    tensors = weights(
        len(SPECULATORS["aux_hidden_state_layer_ids"]) if "speculators" in layout else len(READ)
    )
    if "copies" in layout:
        tensors |= copies()
    if layout == "nested":  # newer files
        config["dflash_config"] = {**config["dflash_config"], "block_size": config.pop("block_size")}
    folder = write(tmp_path, config, tensors)
    made = DFlashModule.load(folder, llama())
    assert made.hidden_layers == ((1, 3) if "speculators" in layout else (1, 3, -1))
    assert made.config.tokens == BLOCK - 1 and made.config.depth == DEPTH
    found = Engine(llama(), DFlash(str(folder)), adaptive=False).generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, params)]
    assert all(g.stats.drafted > 20 for g in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dflash_config": {**ZLAB["dflash_config"], "selector_rank": "8x"}}, "selector_rank in .* a number"),
        ({"dflash_config": {**ZLAB["dflash_config"], "use_swa": True}}, "use_swa=True.*train a drafter"),
        ({"dflash_config": {**ZLAB["dflash_config"], "selector_rank": 8}}, "no tensor 'candidate_selector"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "lacks mask_token_id"),
        ({"dflash_config": {"mask_token_id": 1}}, "lacks target_layer_ids"),
        ({"dflash_config": {**ZLAB["dflash_config"], "mask_token_id": 97}}, "97, is not a token"),
        ({"block_size": "x"}, "block_size in .* must be a number, not 'x'"),
        ({"markov_rank": 4, "markov_head_type": "magic"}, "markov_head_type='magic'; known are vanilla"),
        ({"layer_types": ["chunked_attention"] * DEPTH}, "chunked_attention"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"vocab_size": 98}, "vocabulary of 98"),
        ({"num_hidden_layers": 3}, r"no tensor 'layers\.2\."),
        ({"block_size": None}, "lacks block_size"),
        ({"dflash_config": {**ZLAB["dflash_config"], "target_layer_ids": [0, 2, 7]}}, "layers"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        DFlashModule.load(write(tmp_path, {**ZLAB, **change}, weights()), llama())


def test_speculators_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for change, message in (
        ({"speculators_model_type": "mlp"}, "kind 'mlp'"),
        ({"draft_vocab_size": 50}, "no tensor 'd2t' in .* its 50 drafted ids"),
        ({"draft_vocab_size": 98}, "drafts 98 of 97 tokens"),
        ({"projector_type": "domino"}, "projector_type='domino'"),
    ):
        with pytest.raises(OutpaceError, match=message):
            DFlashModule.load(write(tmp_path, {**SPECULATORS, **change}, weights(2)), llama())
    for name in ("embed_tokens.weight", "lm_head.weight"):
        other = copies()
        other[name] += 1
        with pytest.raises(OutpaceError, match=f"'{name}' in .* is not that of"):
            DFlashModule.load(write(tmp_path, SPECULATORS, weights(2) | other), llama())


DRAFTED = [*range(2, 50), 53, 57, *range(60, 90)]


def reduced() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and tensors of one that drafts a part of the vocabulary."""
    ids = torch.tensor(DRAFTED)
    head = copies()["lm_head.weight"]
    tensors = {
        **weights(2),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(97, dtype=torch.bool).index_fill(0, ids, True),
        "lm_head.weight": head[ids].clone(),
    }
    return {**SPECULATORS, "draft_vocab_size": len(DRAFTED)}, tensors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_part_of_the_vocabulary_is_drafted(tmp_path: Path, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    watch = Watch()
    engine = Engine(llama(), DFlash(str(write(tmp_path, *reduced()))), adaptive=False, observer=watch)
    found = engine.generate(PROMPTS, params)
    assert [g.tokens for g in found] == [g.tokens for g in Engine(llama()).generate(PROMPTS, params)]
    drafted = {token for step in watch.steps for token in step.draft.tokens}
    assert len(drafted) > 3 and drafted <= {*DRAFTED}


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("t2d", torch.ones(97, dtype=torch.bool), "'t2d' in .* marks 97 ids"),
        ("d2t", torch.full((len(DRAFTED),), 40), "'t2d' in .* marks 80 ids as drafted, instead of the 80"),
        ("lm_head.weight", torch.zeros(len(DRAFTED), SIZE), "'lm_head.weight' in .* is not that of"),
    ],
)
def test_maps_of_ids_that_contradict_are_refused(
    tmp_path: Path, name: str, wrong: Tensor, words: str
) -> None:
    config, tensors = reduced()
    with pytest.raises(OutpaceError, match=words):
        DFlashModule.load(write(tmp_path, config, {**tensors, name: wrong}), llama())
