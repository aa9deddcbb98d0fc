"""P-EAGLE as published, in the layouts of speculators and SpecForge: its drafts, and invalid files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.eagle import peagle
from outpace.drafters.eagle.peagle import PEagle, PEagleModule
from outpace.engine.engine import Engine
from unit.learned.test_published import DRAFTED, LAYER, SPECULATORS, llama, weights, write
from watching import Watch

PROMPTS = [[3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6]]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
TOKENS, MASK, DEPTH, SIZE, HEAD, EPS, THETA = 4, 96, 2, 32, 8, 1e-5, 5000.0
READ = (1, 2, 3)
THEIRS = {
    **SPECULATORS,
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "mask_token_id": MASK,
    "norm_before_residual": False,
    "transformer_layer_config": {**LAYER, "num_hidden_layers": DEPTH},
}
# SpecForge's config is that of the layers, and the masked token is named as vLLM reads it.
SPECFORGE = {
    **LAYER,
    "architectures": ["PEagleDraftModel"],
    "num_hidden_layers": DEPTH,
    "draft_vocab_size": len(DRAFTED),
    "pard_token": MASK,
}


def tensors() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    own = weights("layers.0.")
    shapes = {"mask_hidden": (1, 1, 3 * SIZE), "embed_tokens.weight": (97, SIZE)}
    for name, one in own.items():
        if name.startswith("layers.0.") and "hidden_norm" not in name:
            narrow = SIZE if "q_proj" in name or "k_proj" in name or "v_proj" in name else one.shape[-1]
            shapes[name.replace("layers.0.", "layers.1.")] = (*one.shape[:-1], narrow)
    return own | {name: torch.randn(shape, generator=random) / 2 for name, shape in shapes.items()}


def plainly(text: list[int]) -> list[int]:
    """The greedy draft after a text, whose last token is the root, computed over all rows at once."""
    model: Any = llama().model
    own = {name: one.double() for name, one in tensors().items()}
    width, masks = len(text) - 1 + TOKENS - 1, TOKENS - 1

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * own[name + ".weight"]

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(width)[:, None] * THETA ** (
            -torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD
        )
        cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], dim=-1) * sin

    def attended(x: Tensor, at: str) -> Tensor:
        queries, keys, values = (
            (x @ own[f"{at}{part}_proj.weight"].T).view(width, -1, HEAD) for part in "qkv"
        )
        queries, keys = turned(queries), turned(keys)
        seen = torch.empty_like(queries)
        for row in range(width):
            for head in range(4):
                shares = (keys[: row + 1, head // 2] @ queries[row, head] / HEAD**0.5).softmax(0)
                seen[row, head] = shares @ values[: row + 1, head // 2]
        return seen.flatten(1) @ own[at + "o_proj.weight"].T

    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in READ], dim=-1)
        features = torch.cat([read, own["mask_hidden"][0].expand(masks, -1)]) @ own["fc.weight"].T
        embedded = own["embed_tokens.weight"][text[1:] + [MASK] * masks]
        both = torch.cat(
            [norm(embedded, "layers.0.input_layernorm"), norm(features, "layers.0.hidden_norm")], -1
        )
        rows = features + attended(both, "layers.0.self_attn.")
        for layer in range(DEPTH):
            at = f"layers.{layer}."
            if layer:
                rows = rows + attended(norm(rows, at + "input_layernorm"), at + "self_attn.")
            x = norm(rows, at + "post_attention_layernorm")
            gate, up = (x @ own[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            rows = rows + (F.silu(gate) * up) @ own[at + "mlp.down_proj.weight"].T
        best = (norm(rows[-TOKENS:], "norm") @ own["lm_head.weight"].T).argmax(-1)
    return [DRAFTED[place] for place in best.tolist()]


@pytest.mark.parametrize("chunk", [3, 512])
def test_drafts_are_those_of_a_plain_computation(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peagle, "_CHUNK", chunk)
    drafter = PEagle(str(write(tmp_path, THEIRS, tensors())), draws="greedy", max_nodes=0)
    watch = Watch()
    (found,) = Engine(llama(), drafter, adaptive=False, observer=watch).generate([PROMPTS[1]], PARAMS)
    text, compared, seen = list(PROMPTS[1]), 0, set()
    for step in watch.steps:
        if len(step.draft) == TOKENS:
            assert list(step.draft.tokens) == plainly(text)
            compared, seen = compared + 1, seen | {*step.draft.tokens}
        text += step.tokens
    assert text == PROMPTS[1] + found.tokens and compared >= 3 and len(seen) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", ["speculators", "specforge"])
def test_tokens_are_those_of_plain_decoding(layout: str, temperature: float, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    config = THEIRS if layout == "speculators" else SPECFORGE
    write(tmp_path, config, tensors())
    assert PEagleModule.load(tmp_path, llama()).hidden_layers == (
        READ if layout == "speculators" else (2, 2, 1)
    )
    for given in ("", ",max_nodes=0", ",max_nodes=9,num_speculative_tokens=3"):
        engine = Engine(llama(), f"peagle:path={tmp_path}{given}", adaptive=False)
        found = engine.generate([*PROMPTS, [5]], params)
        plain = Engine(llama()).generate([*PROMPTS, [5]], params)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert all(g.stats.drafted > 20 for g in found)


def test_a_draft_is_one_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = [], PEagleModule.advance

    def advance(self: PEagleModule, *given: Any) -> Tensor:
        calls.append(given[0].shape)
        return real(self, *given)

    monkeypatch.setattr(PEagleModule, "advance", advance)
    engine = Engine(llama(), f"peagle:path={write(tmp_path, THEIRS, tensors())}", adaptive=False)
    engine.add(PROMPTS[1], PARAMS)
    steps = 0
    while engine.sequences:
        engine.step()
        steps += 1
    assert 0 < len(calls) <= steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask_token_id": None}, "must have a mask_token_id below 97, not None"),
        ({"mask_token_id": 97}, "must have a mask_token_id below 97, not 97"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "'mask_hidden' has shape"),
        ({"transformer_layer_config": {**LAYER, "num_hidden_layers": 3}}, r"no tensor 'layers\.2\."),
    ],
)
def test_a_config_that_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match=message):
        PEagleModule.load(write(tmp_path, {**THEIRS, **change}, tensors()), llama())


def test_the_state_of_a_mask_must_be_there(tmp_path: Path) -> None:
    given = tensors()
    del given["mask_hidden"]
    with pytest.raises(OutpaceError, match="no tensor 'mask_hidden'"):
        PEagleModule.load(write(tmp_path, THEIRS, given), llama())


def test_a_folder_without_one_is_refused_and_none_is_saved(tmp_path: Path) -> None:
    made = PEagleModule.load(write(tmp_path, THEIRS, tensors()), llama())
    with pytest.raises(OutpaceError, match="is not saved; keep its folder"):
        made.save(tmp_path / "saved")
    (tmp_path / "config.json").unlink()
    with pytest.raises(OutpaceError, match=r"no P-EAGLE.s config.json in .*; give a published one"):
        PEagleModule.load(tmp_path, llama())
