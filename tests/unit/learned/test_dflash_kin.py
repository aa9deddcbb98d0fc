"""Published drafters of DFlash's kin: drafts equal to a plain computation, by the vendors' names and layouts.

DSpark by DeepSeek (Qwen3DSparkModel), SpecForge (DSparkDraftModel), speculators; DFlash 2 by z-lab; JetSpec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core import OutpaceError, SamplingParams
from outpace.drafters.blocks.dflash import DFlash
from outpace.drafters.blocks.dflash_module import DFlashModule
from outpace.engine.engine import Engine
from unit.learned.test_published_dflash import (
    BLOCK,
    DEPTH,
    DRAFTED,
    LAYER,
    MASK,
    READ,
    SIZE,
    SPECULATORS,
    ZLAB,
    llama,
    outputs,
    weights,
    write,
)
from watching import Watch

PROMPT = [6, 1, 6, 1, 6, 1, 6]
PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
RANK, TAPS, GROUP, CANDIDATES = 4, 3, 8, 5


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 5) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def markov(kind: str, drafted: int = 97) -> dict[str, Tensor]:
    """The tensors of DSpark's heads."""
    at = "markov_head."
    shapes = {
        at + "markov_w1.weight": (97, RANK),
        at + "markov_w2.weight": (drafted, RANK),
        "confidence_head.proj.weight": (1, SIZE + RANK),
        "confidence_head.proj.bias": (1,),
    }
    if kind == "gated":
        shapes |= {at + "gate_proj.weight": (RANK, SIZE + RANK), at + "gate_proj.bias": (RANK,)}
    if kind == "rnn":
        shapes |= {at + "joint_proj.weight": (3 * RANK, 2 * RANK + SIZE), at + "joint_proj.bias": (3 * RANK,)}
    return random_tensors(shapes)


def dflash2() -> dict[str, Tensor]:
    """The tensors that DFlash 2 has beside DFlash's."""
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (97, RANK),
        "candidate_selector.successor_codebook": (97, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, SIZE),
    }
    for layer in range(DEPTH):
        for part in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{layer}.{part}.base_kernel"] = (2, TAPS, SIZE)
            shapes[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * TAPS * SIZE // GROUP, SIZE)
    return {name: one / 4 for name, one in random_tensors(shapes).items()}


@dataclass
class Kin:
    """A published layout, and what its drafts are."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    anchored: bool = False
    causal: bool = False
    kind: str = ""  # of the Markov head
    read: int = len(READ)

    @property
    def every(self) -> dict[str, Tensor]:
        return {**weights(self.read), **self.tensors}

    @property
    def tokens(self) -> int:
        return BLOCK - (not self.anchored)


_NESTED = ZLAB["dflash_config"]
_FLAT = {key: value for key, value in ZLAB.items() if key not in ("dflash_config", "auto_map")}
KIN = {
    "jetspec": Kin({**ZLAB, "dflash_config": {**_NESTED, "causal_head": True}}, causal=True),
    **{
        f"deepseek, {kind}": Kin(
            {
                **_FLAT,
                "architectures": ["Qwen3DSparkModel"],
                **_NESTED,
                "num_anchors": 8,
                "markov_rank": RANK,
                "markov_head_type": kind,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
            markov(kind),
            anchored=True,
            kind=kind,
        )
        for kind in ("vanilla", "gated", "rnn")
    },
    "specforge": Kin(
        {
            **ZLAB,
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {
                **_NESTED, "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "vanilla"
            },
        },
        markov("vanilla"),
        anchored=True,
        kind="vanilla",
    ),
    "fill-in": Kin(
        {**ZLAB, "markov_rank": RANK, "sample_from_anchor": False}, markov("gated"), kind="gated"
    ),
    "dflash 2": Kin(
        {
            **ZLAB,
            "dflash_config": {
                **_NESTED,
                "conv_kernel_size": TAPS,
                "conv_group_size": GROUP,
                "selector_rank": RANK,
                "selector_top_k": CANDIDATES,
                "input_embedding_scale": 1.5,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 3.0,
            },
        },
        dflash2(),
    ),
}  # fmt: skip
KIN["fill-in"].config["markov_head_type"] = "gated"


def convolved(tensors: dict[str, Tensor], name: str, side: int, before: Tensor, rows: Tensor) -> Tensor:
    """Rows of a layer's part in DFlash 2, number by number."""
    kernel = tensors[name + "base_kernel"].double()
    added = before @ tensors[name + "kernel_projection.weight"].double().T
    added = added.view(len(rows), 2, TAPS, SIZE // GROUP)
    found = torch.zeros_like(rows)
    for place in range(len(rows)):
        for tap in range(min(TAPS, place + 1)):
            for number in range(SIZE):
                own = kernel[side, tap, number] + added[place, side, tap, number // GROUP]
                found[place, number] += own * rows[place - tap, number]
    return found


def chain(kin: Kin, text: list[int], root: int) -> list[int]:
    """The greedy draft after a text and its root, token by token."""
    own = {name: one.double() for name, one in kin.every.items()}
    model: Any = llama().model
    nested = kin.config.get("dflash_config", {})
    second = "selector_rank" in nested
    rows = outputs(
        text,
        root,
        kin.every,
        width=BLOCK,
        causal=kin.causal,
        convolved=(lambda *given: convolved(kin.every, *given)) if second else lambda name, side, x, y: y,
        scale=nested.get("input_embedding_scale", 1.0),
    )
    rows, tokens, state = rows[not kin.anchored :], [root], torch.zeros(RANK, dtype=torch.float64)
    with torch.no_grad():
        for row in rows:
            logits = model.lm_head(row)
            if second:
                logits = 3.0 * torch.tanh(logits * 0.5 / 3.0)
                asked = own["candidate_selector.predecessor_codebook"][tokens[-1]] * (
                    own["candidate_selector.hidden_projection.weight"] @ row
                )
                best = logits.topk(CANDIDATES).indices
                edges = own["candidate_selector.successor_codebook"][best] @ asked
                tokens.append(int(best[(logits[best] + edges).argmax()]))
                continue
            if kin.kind:
                bias, state = bias_of(kin.kind, own, tokens[-1], row, state)
                logits = logits + bias
            tokens.append(int(logits.argmax()))
    return tokens[1:]


def bias_of(
    kind: str, own: dict[str, Tensor], token: int, row: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """DSpark's bias after a token, and the recurrent state after it."""
    at = "markov_head."
    before, head = own[at + "markov_w1.weight"][token], own[at + "markov_w2.weight"]
    if kind == "vanilla":
        return head @ before, state
    if kind == "gated":
        gate = own[at + "gate_proj.weight"] @ torch.cat([row, before]) + own[at + "gate_proj.bias"]
        return head @ (gate.sigmoid() * before), state
    joint = own[at + "joint_proj.weight"] @ torch.cat([state, before, row]) + own[at + "joint_proj.bias"]
    gate, candidate, out = joint[:RANK].sigmoid(), joint[RANK : 2 * RANK].tanh(), joint[2 * RANK :].tanh()
    return head @ out, gate * state + (1 - gate) * candidate


@pytest.mark.parametrize("name", KIN)
def test_drafts_are_those_of_a_plain_computation(name: str, tmp_path: Path) -> None:
    kin, watch = KIN[name], Watch()
    drafter = DFlash(str(write(tmp_path, kin.config, kin.every)), draws="greedy", max_nodes=0)
    (found,) = Engine(llama(), drafter, adaptive=False, observer=watch).generate([PROMPT], PARAMS)
    text, compared, seen = list(PROMPT), 0, set()
    for step in watch.steps:
        if len(step.draft) == kin.tokens:
            assert list(step.draft.tokens) == chain(kin, text[:-1], text[-1])
            compared, seen = compared + 1, seen | {*step.draft.tokens}
        text += step.tokens
    assert text == PROMPT + found.tokens and compared >= 3 and len(seen) > 1


@pytest.mark.parametrize("nodes", [None, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["jetspec", "deepseek, rnn", "dflash 2"])
def test_tokens_are_those_of_plain_decoding(
    name: str, temperature: float, nodes: int | None, tmp_path: Path
) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=4)
    prompts, kin = [[3, 9, 2, 7], PROMPT], KIN[name]
    drafter = DFlash(str(write(tmp_path, kin.config, kin.every)), max_nodes=nodes)
    for verifier in ("match", "rejection"):
        found = Engine(llama(), drafter, verifier, adaptive=False).generate(prompts, params)
        if verifier == "match" or not temperature:
            plain = Engine(llama()).generate(prompts, params)
            assert [g.tokens for g in found] == [g.tokens for g in plain]
        assert all(g.stats.drafted > 8 for g in found)


def test_speculators_dspark_drafts_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    ids = torch.tensor(DRAFTED)
    tensors = {
        **weights(2),
        **markov("vanilla", len(ids)),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(97, dtype=torch.bool).index_fill(0, ids, True),
    }
    config = {
        **SPECULATORS,
        "speculators_model_type": "dspark",
        "draft_vocab_size": len(ids),
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
    }
    drafter, watch = DFlash(str(write(tmp_path, config, tensors))), Watch()
    assert DFlashModule.load(tmp_path, llama()).config.tokens == BLOCK
    (found,) = Engine(llama(), drafter, adaptive=False, observer=watch).generate([PROMPT], PARAMS)
    (plain,) = Engine(llama()).generate([PROMPT], PARAMS)
    drafted = {token for step in watch.steps for token in step.draft.tokens}
    assert found.tokens == plain.tokens and drafted and drafted <= {*DRAFTED}


def test_layers_with_a_window_are_causal_in_speculators_layout(tmp_path: Path) -> None:
    layer = {**LAYER, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    layer["use_sliding_window"] = True
    for told, causal in ((False, (True, False)), (True, ())):
        config = {**SPECULATORS, "transformer_layer_config": layer, "sliding_window_non_causal": told}
        made = DFlashModule.load(write(tmp_path, config, weights(2)), llama())
        assert made.windows == (4, 0) and made.causal == causal


def test_a_chain_is_drafted_by_default_where_places_depend_on_tokens(tmp_path: Path) -> None:
    kin = KIN["deepseek, vanilla"]
    watch = Watch()
    for nodes, branches in ((None, False), (12, True)):
        watch.steps.clear()
        drafter = DFlash(str(write(tmp_path, kin.config, kin.every)), max_nodes=nodes)
        Engine(llama(), drafter, adaptive=False, observer=watch).generate([PROMPT], PARAMS)
        assert any(len({*s.draft.parents}) < len(s.draft) for s in watch.steps) == branches


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dflash 2", {"conv_group_size": 5}, "conv_group_size must divide the hidden size of 32, not 5"),
        ("dflash 2", {"selector_rank": 3}, r"'candidate_selector.predecessor_codebook' has shape \[97, 4\]"),
        ("deepseek, vanilla", {"markov_head_type": "rnn"}, "no tensor 'markov_head.joint_proj"),
        ("deepseek, rnn", {"markov_rank": 0}, "tensor 'markov_head.* is not expected"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = dict(KIN[name].config)
    if "dflash_config" in config:
        config["dflash_config"] = {**config["dflash_config"], **change}
    with pytest.raises(OutpaceError, match=message):
        DFlashModule.load(write(tmp_path, {**config, **change}, KIN[name].every), llama())


def test_further_parts_are_neither_saved_nor_trained(tmp_path: Path) -> None:
    kin = KIN["jetspec"]
    folder = write(tmp_path / "theirs", kin.config, kin.every)
    with pytest.raises(OutpaceError, match="further parts is not saved"):
        DFlashModule.load(folder, llama()).save(tmp_path / "ours")

    class Trained(DFlashModule):
        extends = False

    with pytest.raises(OutpaceError, match="parts that are not trained: causal; train one"):
        Trained.load(folder, llama())


def test_the_mask_is_a_token(tmp_path: Path) -> None:
    kin = KIN["jetspec"]
    made = DFlashModule.load(write(tmp_path, kin.config, kin.every), llama())
    assert torch.equal(made.mask[0], llama().embed(torch.tensor([MASK]))[0])
