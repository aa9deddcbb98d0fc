"""Networks as their papers describe them, each with a slow reference; the weights and masks of losses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from models import tiny_llama
from outpace.drafters.blocks.dflash_module import DFlashConfig
from outpace.drafters.eagle.eagle_module import EagleConfig
from outpace.drafters.heads.hydra import HydraConfig
from outpace.drafters.support.vocabulary import part_of
from outpace.targets import Target
from outpace_lab.drafters.blockwise import BlockwiseConfig, BlockwiseHeads
from outpace_lab.drafters.parallel_tokens import LookAhead, LookAheadConfig
from outpace_lab.drafters.spec_drafter import SpecDrafterConfig, SpecDrafterModule
from outpace_lab.train.data import Document
from outpace_lab.train.modules.blocks import TrainedDFlash, draw_places
from outpace_lab.train.modules.eagle import TrainedEagle
from outpace_lab.train.modules.heads import TrainedHydra
from outpace_lab.train.objectives import ground_truth
from outpace_lab.train.reading import read_batch
from outpace_lab.train.trained import Trained, TrainingBatch

TARGET = Target(tiny_llama(layers=3))
TEXT = [3, 9, 2, 7, 11]


def made(cls: type[Trained], config: Any) -> Any:
    """A module in which every weight counts."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        module = cls.new(config, TARGET).double()
        with torch.no_grad():
            for weight in module.parameters():
                weight.add_(torch.randn_like(weight) / 4)
    return module.requires_grad_(False)


def states(count: int) -> Tensor:
    return torch.randn(count, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_blockwise_heads_are_outputs_of_one_layer_added_to_the_state() -> None:
    """Stern et al. 2018, section 6."""
    module = made(BlockwiseHeads, BlockwiseConfig(heads=3, width=0.5))
    weights, given, owners = module.state_dict(), states(2), torch.tensor([1, 0, 1])
    inner = (given @ weights["hidden.weight"].T + weights["hidden.bias"]).clamp(min=0)
    assert inner.shape[1] == 3 * 16
    for depth in range(3):
        own = inner @ weights[f"outputs.{depth}.weight"].T + weights[f"outputs.{depth}.bias"]
        paths = torch.ones(3, 1 + depth, dtype=torch.long)
        torch.testing.assert_close(
            module.rows(given, owners, paths), TARGET.head(given + own)[owners], rtol=1e-9, atol=1e-9
        )


def test_hydra_heads_read_the_state_and_the_path_from_the_root_on() -> None:
    """Ankner et al. 2024, section 3."""
    module = made(TrainedHydra, HydraConfig(heads=3, layers=3))
    weights, given, owners = module.state_dict(), states(2), torch.tensor([1, 0])

    def layer(name: str, rows: Tensor) -> Tensor:
        mixed = rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return mixed * mixed.sigmoid()

    for depth in range(3):
        paths = torch.tensor([[5, 9, 2], [8, 8, 1]])[:, : 1 + depth]
        own = given[owners]
        for row in range(2):
            read = torch.cat([own[row], *(TARGET.embed(token) for token in paths[row])])
            mixed = own[row] + layer(f"first.{depth}", read)
            for block in range(2):
                mixed = mixed + layer(f"blocks.{depth}.{block}.linear", mixed)
            found = module.rows(given, owners, paths)[row]
            torch.testing.assert_close(found, TARGET.head(mixed), rtol=1e-9, atol=1e-9)


def test_a_spec_drafter_is_a_llama_whose_masks_see_each_other() -> None:
    module = made(SpecDrafterModule, SpecDrafterConfig(tokens=4, hidden_size=24, depth=3, kv_heads=2))
    config = LlamaConfig(**module.config.transformers(), vocab_size=TARGET.vocabulary, num_hidden_layers=3)
    config._attn_implementation = "eager"
    llama = LlamaModel(config).double().eval()
    own = {name: weight for name, weight in module.state_dict().items() if name != "masks"}
    llama.load_state_dict(own)
    rows = torch.cat([module.embed_tokens(torch.tensor(TEXT)), module.masks])
    seen = torch.ones(9, 9).tril().bool()
    seen[5:] = True
    hidden = llama(
        inputs_embeds=rows[None],
        position_ids=torch.arange(9)[None],
        attention_mask=torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~seen, -1e9),
        use_cache=False,
    ).last_hidden_state
    batch = read_batch(TARGET, [[Document(tuple(TEXT))]], ())
    found = module.logits(module.blocks(batch, torch.tensor([[4]])))[0, 0]
    # Eager attention computes its softmax in float32.
    torch.testing.assert_close(found, hidden[0, 5:] @ own["embed_tokens.weight"].T, rtol=0, atol=1e-4)


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    return rows * (rows.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * weight


def turn(row: Tensor, place: int) -> Tensor:
    """One head's numbers, turned in pairs by a place."""
    half = len(row) // 2
    turned = torch.empty_like(row)
    for pair in range(half):
        angle = torch.tensor(place * 10000.0 ** (-pair / half), dtype=torch.float64)
        first, second = row[pair], row[pair + half]
        turned[pair] = first * angle.cos() - second * angle.sin()
        turned[pair + half] = second * angle.cos() + first * angle.sin()
    return turned


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def gated(layer: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The feed-forward part, of normed rows."""
    gate = rows @ layer["mlp.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (rows @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def attended(layer: dict[str, Tensor], rows: Tensor) -> Tensor:
    """The last row's attention over all rows, at places 0, 1, ...: 4 heads of 8 numbers, 2 of keys."""

    def heads(name: str) -> Tensor:
        return (rows @ layer[f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, 8)

    queries, keys, values = heads("q"), heads("k"), heads("v")
    out = []
    for head in range(4):
        query = turn(queries[-1, head], len(rows) - 1)
        scores = torch.stack([query @ turn(keys[at, head // 2], at) for at in range(len(rows))])
        out.append((scores / 8**0.5).softmax(dim=0) @ values[:, head // 2])
    return torch.cat(out) @ layer["self_attn.o_proj.weight"].T


def eagle(
    weights: dict[str, Tensor],
    features: Tensor,
    version: int,
    depth: int,
    normed_first: bool = False,
    normed_output: bool = False,
) -> Tensor:
    """The outputs after the text so far, [depth, 32]: each but the first continues from the one before.

    Args:
        features: of the text's places, [root, 32].
    """
    layer = part(weights, "layers.0.")
    rows: list[Tensor] = []
    outputs: list[Tensor] = []
    for place in range(len(features) + depth - 1):
        feature = features[place] if place < len(features) else outputs[-1]
        token = TARGET.embed(torch.tensor(TEXT[place + 1]))
        if version == 1:
            rows.append(torch.cat([token, feature]) @ weights["fc.weight"].T + weights["fc.bias"])
            kept = rows[-1]
        else:
            normed = norm(feature, layer["hidden_norm.weight"])
            rows.append(torch.cat([norm(token, layer["input_layernorm.weight"]), normed]))
            kept = normed if normed_first else feature
        state = kept + attended(layer, torch.stack(rows))
        output = state + gated(layer, norm(state, layer["post_attention_layernorm.weight"]))
        outputs.append(norm(output, weights["norm.weight"]) if normed_output else output)
    return torch.stack(outputs[-depth:])


@pytest.mark.parametrize(("version", "normed_first"), [(1, False), (3, False), (3, True)])
def test_eagle_goes_on_with_the_targets_states_and_its_own(version: int, normed_first: bool) -> None:
    """Li et al. 2024, section 4.1, with no norm before attention; Li et al. 2025, section 3.1, and with a
    residual branch that begins with the normed feature, as in some of speculators' files.
    """
    layers = () if version == 1 else (3, 1, 2)
    config = EagleConfig(
        version=version, layers=layers, kv_heads=2, draft_vocabulary=60, norm_before_residual=normed_first
    )
    module = made(TrainedEagle, config)
    weights = module.state_dict()
    batch = read_batch(TARGET, [[Document(tuple(TEXT))]], module.hidden_layers)
    root = 2
    if version == 1:
        features = batch.hidden[-1][0, :root]
    else:
        features = torch.cat([batch.hidden[layer][0, :root] for layer in layers], 1) @ weights["fc.weight"].T
    expected = eagle(weights, features, version, depth=3, normed_first=normed_first)
    if version == 1:
        logits = TARGET.head(expected)[:, :60]
    else:
        logits = norm(expected, weights["norm.weight"]) @ weights["lm_head.weight"].T
    # The row before the root's drafts.
    found = torch.stack([states[0, root - 1] for states in module.unroll(batch, 3)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(module.drafted_logits(found), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("norms", ["norm_before_fc", "fc_norm", "norm_output"])
def test_eagle_norms_what_it_reads_or_says_as_published_files_do(norms: str) -> None:
    """The three options of speculators' Eagle3SpeculatorConfig."""
    layers, root = (3, 1, 2), 2
    config = EagleConfig(layers=layers, kv_heads=2, draft_vocabulary=60, **{norms: True})
    module = made(TrainedEagle, config)
    weights = module.state_dict()
    batch = read_batch(TARGET, [[Document(tuple(TEXT))]], module.hidden_layers)
    read = [batch.hidden[layer][0, :root] for layer in layers]
    if norms == "fc_norm":
        read = [norm(rows, weights[f"fc_norm.{place}.weight"]) for place, rows in enumerate(read)]
    both = torch.cat(read, 1)
    if norms == "norm_before_fc":
        both = norm(both, weights["input_norm.weight"])
    normed_output = norms == "norm_output"
    expected = eagle(weights, both @ weights["fc.weight"].T, 3, depth=3, normed_output=normed_output)
    said = expected if normed_output else norm(expected, weights["norm.weight"])
    found = torch.stack([states[0, root - 1] for states in module.unroll(batch, 3)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    logits = said @ weights["lm_head.weight"].T
    torch.testing.assert_close(module.drafted_logits(found), logits, rtol=0, atol=1e-4)


def test_dflash_hands_the_targets_states_to_every_layer_as_keys_and_values() -> None:
    """Chen, Liang, Liu 2026, section 4.1, with Qwen3's layers, one number after the other."""
    module = made(TrainedDFlash, DFlashConfig(tokens=3, layers=(3, 1), depth=2, kv_heads=2))
    weights = module.state_dict()
    batch = read_batch(TARGET, [[Document(tuple(TEXT))]], (1, 3))
    root = 3
    text = torch.cat([batch.hidden[3][0, :root], batch.hidden[1][0, :root]], dim=1)
    text = norm(text @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    rows = torch.cat([TARGET.embed(torch.tensor(TEXT[root : root + 1])), weights["mask"].expand(3, -1)])
    for place in range(2):
        layer = part(weights, f"layers.{place}.")

        def heads(rows: Tensor, name: str, layer: dict[str, Tensor] = layer) -> Tensor:
            return (rows @ layer[f"self_attn.{name}_proj.weight"].T).view(len(rows), -1, 8)

        normed = norm(rows, layer["input_layernorm.weight"])
        context = torch.cat([text, normed])
        queries = norm(heads(normed, "q"), layer["self_attn.q_norm.weight"])
        keys = norm(heads(context, "k"), layer["self_attn.k_norm.weight"])
        values = heads(context, "v")
        out = torch.empty(4, 4, 8, dtype=torch.float64)
        for row in range(4):
            for head in range(4):
                query = turn(queries[row, head], root + row)
                scores = torch.stack([query @ turn(keys[at, head // 2], at) for at in range(len(context))])
                out[row, head] = (scores / 8**0.5).softmax(dim=0) @ values[:, head // 2]
        rows = rows + out.flatten(1) @ layer["self_attn.o_proj.weight"].T
        rows = rows + gated(layer, norm(rows, layer["post_attention_layernorm.weight"]))
    expected = TARGET.head(norm(rows[1:], weights["norm.weight"]))
    found = module.logits(module.blocks(batch, torch.tensor([[root]])))[0, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "config", "weights"),
    [
        (BlockwiseHeads, BlockwiseConfig(heads=3), [1, 1, 1]),
        (TrainedHydra, HydraConfig(heads=3, decay=0.5), [1, 0.5, 0.25]),
        (LookAhead, LookAheadConfig(3), [1, 1, 1]),
        # exp(-(k - 1) / decay)
        (SpecDrafterModule, SpecDrafterConfig(tokens=3, decay=2.0), [1, 0.60653066, 0.36787944]),
        (TrainedDFlash, DFlashConfig(tokens=3, decay=2.0), [1, 0.60653066, 0.36787944]),
        (TrainedEagle, EagleConfig(steps=3, decay=0.5), [1, 0.5, 0.25]),
    ],
)
def test_a_loss_weighs_distances_as_its_options_say(
    cls: type[Trained], config: Any, weights: list[float]
) -> None:
    module = made(cls, config)
    batch = read_batch(TARGET, [[Document((*TEXT, 8, 1, 4))]], module.hidden_layers)
    losses = module.loss(batch, ground_truth)
    assert len(set(losses.loss.tolist())) == 3
    expected = losses.loss.double() @ torch.tensor(weights, dtype=torch.float64)
    assert losses.total.item() == pytest.approx(expected.item())


def test_places_are_drawn_where_there_is_something_to_learn() -> None:
    counted = torch.zeros(2, 40, dtype=torch.bool)
    counted[0, 20:24] = True
    counted[1, 30] = True
    tokens = torch.zeros(2, 40, dtype=torch.long)
    batch = TrainingBatch(tokens, tokens, tokens, counted, {}, tokens[..., None].float())
    places = draw_places(batch, 5, (2, 3))
    # Two or three places before a token that counts: 17 to 21, and 27 and 28.
    assert sorted(places[0].tolist()) == [17, 18, 19, 20, 21]
    assert {27, 28} < set(places[1].tolist()) and len(set(places[1].tolist())) == 5
    assert draw_places(batch, 99, (1,)).shape == (2, 40)


def test_look_ahead_rows_stand_where_a_token_counts_that_they_guess() -> None:
    """No row predicts the token one place ahead."""
    module = made(LookAhead, LookAheadConfig(1, places=3))
    batch = read_batch(TARGET, [[Document((*TEXT, 8, 1, 4), 5)]], ())
    for _ in range(8):
        assert module.loss(batch, ground_truth).places.tolist() == [3]


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("version", [1, 3])
def test_eagle_drafts_the_tokens_that_are_learnt_most_often(version: int, own_head: bool) -> None:
    config = EagleConfig(version=version, draft_vocabulary=4, own_head=own_head and version == 3)
    module = made(TrainedEagle, config)
    assert module.drafted is not None and module.drafted.tolist() == [0, 1, 2, 3]
    counts = torch.zeros(TARGET.vocabulary, dtype=torch.long)
    counts[[50, 7, 31]] = torch.tensor([2, 9, 2])
    states = torch.randn(3, TARGET.hidden.size, dtype=torch.double)
    module.drafted_logits(states)
    module.suit(counts)
    ids = [0, 7, 31, 50]  # of those that never occur the first
    assert module.drafted.tolist() == ids and module.t2d.nonzero().flatten().tolist() == ids
    normed = states if version == 1 else norm(states, module.norm.weight)
    rows = module.drafted_logits(states)
    torch.testing.assert_close(rows, TARGET.head(normed)[:, ids])
    full = part_of(module.drafted, TARGET.vocabulary).logits(rows)
    assert full[:, ids].isfinite().all() and full.isinf().sum() == 3 * (TARGET.vocabulary - len(ids))


def test_eagle_learns_the_targets_logits_of_the_tokens_that_it_drafts() -> None:
    module = made(TrainedEagle, EagleConfig(layers=(1, -1), draft_vocabulary=40, own_head=False, steps=3))
    counts = torch.zeros(TARGET.vocabulary, dtype=torch.long)
    counts[TEXT] = 1
    module.suit(counts)
    batch = read_batch(TARGET, [[Document(tuple(TEXT), 2)]], module.hidden_layers)
    seen = []

    def record(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        seen.append((target, labels))
        return draft.sum(dim=-1)

    module.loss(batch, record)
    assert module.drafted is not None
    for depth, (target, labels) in enumerate(seen):
        first = max(2, depth + 2)  # of the tokens learnt at this depth
        expected = batch.logits[0, first - 1 : len(TEXT) - 1][:, module.drafted]
        torch.testing.assert_close(target, expected)
        assert module.drafted[labels].tolist() == TEXT[first:]


def test_eagle_computes_each_row_that_drafts_a_learnt_token_at_some_depth() -> None:
    """The next token of a row may be the prompt's, and a later one the answer's first."""
    module = made(TrainedEagle, EagleConfig(layers=(1, -1)))
    every = read_batch(TARGET, [[Document((*TEXT, 8, 1, 4))]], module.hidden_layers)
    some = torch.tensor([[False, False, False, False, True, False, False, True]])
    batch = replace(every, counted=some)
    pairs = zip(module.unroll(batch, 4), module.unroll(every, 4), strict=True)
    for depth, (own, expected) in enumerate(pairs):
        where = batch.ahead(depth + 2)[:, :-1]
        assert where.any()
        torch.testing.assert_close(own[where], expected[where])


@pytest.mark.parametrize("version", [1, 3])
def test_eagle_learns_nothing_from_a_text_without_a_learnt_token(version: int) -> None:
    module = made(TrainedEagle, EagleConfig(version=version, steps=3))
    batch = read_batch(TARGET, [[Document(tuple(TEXT), len(TEXT))]], module.hidden_layers)
    losses = module.loss(batch, ground_truth)
    assert losses.total == 0 and losses.places.tolist() == [0, 0, 0]
    assert module.accepted(batch).sum() == 0


def test_a_trained_eagle_keeps_its_tokens_and_its_head(tmp_path: Path) -> None:
    made(TrainedEagle, EagleConfig(layers=(1, -1), draft_vocabulary=4)).save(tmp_path)
    module = TrainedEagle.of(tmp_path, TARGET)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.suit(torch.arange(TARGET.vocabulary))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
