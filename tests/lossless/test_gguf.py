"""Drafts are lossless for GGUF files by outpace's own functions: the tokens are those of plain decoding."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.core import SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.loading import load
from outpace.native.layers import functions
from outpace.targets import TargetModel, of_file
from outpace.targets.gguf import GgufFile
from zoo.test_families import RandomTrees

pytest.importorskip("gguf", reason="needs outpace[gguf]")
from gguf_files import gguf_file
from gguf_models import write_file
from mtp_folders import write_beside
from unit.targets.test_gguf_file import STOCK, model

pytestmark = pytest.mark.skipif(isinstance(functions(torch.float32), str), reason="nothing is compiled here")

AT_ONCE = 4
PROMPTS = [[40 + (7 * start + 3 * place) % 50 for place in range(9 + 5 * start)] for start in range(AT_ONCE)]
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
PARAMS = [replace(GREEDY, temperature=0.9 * (place % 2), seed=place) for place in range(AT_ONCE)]
# A file's mix -> types of matrices, by the ends of their names; "" for all others.
MIXES: dict[str, dict[str, str]] = {
    "q4_k_m": {"": "q4_k", "attn_v.weight": "q6_k", "ffn_down.weight": "q6_k", "output.weight": "q6_k"},
    "q5_0": {"": "q5_0", "attn_v.weight": "q8_0", "ffn_down.weight": "q5_1", "output.weight": "q8_0"},
    "q3_k": {"": "q3_k", "attn_q.weight": "q2_k", "ffn_down.weight": "q5_k", "token_embd.weight": "q2_k"},
    "iq4": {"": "iq4_xs", "attn_k.weight": "iq4_nl", "ffn_up.weight": "mxfp4", "ffn_down.weight": "q4_1"},
    "q8_0": {"": "q8_0"},
    "bf16": {"": "bf16", "attn_v.weight": "q4_0"},
}


@cache
def folder() -> Path:
    return Path(mkdtemp())


@cache
def file_of(mix: str) -> Path:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    types = MIXES[mix]

    def kind(name: str) -> str:
        return next((types[end] for end in types if end and name.endswith(end)), types[""])

    return write_file(model, folder() / f"{mix}.gguf", kind)


@cache
def target(mix: str) -> TargetModel:
    return of_file(file_of(mix), others=False)


def decode(mix: str, drafter: Any, slots: int, chunk: int) -> list[list[int]]:
    return decoded(target(mix), drafter, slots, chunk)


def decoded(of: TargetModel, drafter: Any, slots: int, chunk: int) -> list[list[int]]:
    engine = Engine(of, drafter, adaptive=False, slots=slots, prefill_chunk=chunk)
    return [generation.tokens for generation in engine.generate(PROMPTS, PARAMS)]


@cache
def plain(mix: str) -> list[list[int]]:
    return decode(mix, "none", 1, 512)


@pytest.mark.parametrize("mix", MIXES)
def test_steps_are_native_and_bit_exact(mix: str) -> None:
    of = target(mix)
    assert of.plan.native and of.bit_exact and of.dtype == torch.bfloat16
    assert set(of.plan.packed) >= set(MIXES[mix].values()) - {MIXES[mix].get("token_embd.weight")}


@pytest.mark.parametrize(
    ("mix", "drafter", "slots", "chunk"),
    [
        ("q4_k_m", "suffix", 1, 7),
        ("q4_k_m", "trees", AT_ONCE, 512),
        ("q5_0", "lookahead", AT_ONCE, 5),
        ("q5_0", "trees", 1, 3),
        ("q3_k", "trees", AT_ONCE, 11),
        ("iq4", "trees", AT_ONCE, 9),
        ("bf16", "trees", AT_ONCE, 6),
        ("q4_k_m", "early_exit:layers=2", 1, 512),
        ("q8_0", "self", 1, 512),
        ("q3_k", "mtp", AT_ONCE, 512),
    ],
)
def test_tokens_are_those_of_plain_decoding(mix: str, drafter: str, slots: int, chunk: int) -> None:
    assert all(len(set(tokens)) > 5 for tokens in plain(mix)), "the random model loops"
    trees = RandomTrees(dict(zip(map(tuple, PROMPTS), plain(mix), strict=True)))
    predicting = f"mtp:path={predicting_of(mix)},num_speculative_tokens=3" if drafter == "mtp" else drafter
    assert decode(mix, trees if drafter == "trees" else predicting, slots, chunk) == plain(mix)
    assert drafter != "trees" or len(trees.scattered) > 10


@cache
def other_target(family: str) -> TargetModel:
    """A family without compiled steps, in several types."""
    types = cycle(["q4_0", "q5_1", "q8_0", "iq4_nl"])
    path = write_file(model(family), folder() / f"{family}.gguf", lambda name: next(types), STOCK[family][1])
    return of_file(path, "float32", others=False, exact=True)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_5_text", "gpt2", "gemma4_text"])
def test_tokens_are_those_of_plain_decoding_in_families_without_compiled_steps(family: str) -> None:
    right = decoded(other_target(family), "none", 1, 512)
    trees = RandomTrees(dict(zip(map(tuple, PROMPTS), right, strict=True)))
    assert decoded(other_target(family), trees, AT_ONCE, 5) == right
    assert decoded(other_target(family), "suffix", 2, 7) == right  # so that sequences join others


def test_a_file_on_the_hub_is_named_by_its_quantisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    of_one = tmp_path / "models--some--nano-GGUF"
    for name in ("snapshots/0123", "blobs"):
        (of_one / name).mkdir(parents=True)
    for kind in ("q8_0", "bfloat16"):
        shutil.copy(gguf_file(kind), of_one / "blobs" / kind)
    for name, kind in (("nano-Q8_0.gguf", "q8_0"), ("nano-BF16.gguf", "bfloat16")):
        (of_one / "snapshots" / "0123" / name).symlink_to(f"../../blobs/{kind}")
    found, right = (load(name, backend="native") for name in ("some/nano-GGUF:Q8_0", gguf_file("q8_0")))
    assert (
        set(found.target.plan.packed) == set(right.target.plan.packed) and "q8_0" in found.target.plan.packed
    )
    texts = [one.engine("suffix").generate(["def add(a, b):"], GREEDY)[0].text for one in (found, right)]
    assert texts[0] == texts[1]


@cache
def predicting_of(mix: str) -> Path:
    """A prediction layer for the model of a file."""
    return write_beside(folder() / f"{mix}-mtp", dequantised(mix), plain(mix))


def test_rows_of_prompts_that_begin_alike_are_computed_once() -> None:
    engine = Engine(target("q4_k_m"), "suffix", adaptive=False, prefix_cache=2**24)
    for _ in range(2):
        found = engine.generate([PROMPTS[3] * 3], PARAMS[3:])[0]
        assert found.tokens == Engine(target("q4_k_m")).generate([PROMPTS[3] * 3], PARAMS[3:])[0].tokens
    assert found.stats.cached_tokens >= 32


@pytest.mark.parametrize("drafter", ["eagle:num_speculative_tokens=3,expand=3,max_nodes=8", "medusa"])
def test_drafters_that_read_states_read_those_of_a_file(drafter: str) -> None:
    """They were trained for the embedded model, whose states in 8 bits are about the same."""
    nano = of_file(gguf_file("q8_0"), others=False)
    found, right = (
        Engine(nano, name, adaptive=False, slots=AT_ONCE).generate(PROMPTS, PARAMS)
        for name in (drafter, None)
    )
    assert [one.tokens for one in found] == [one.tokens for one in right]
    assert sum(one.stats.accepted for one in found) > 10


def test_a_file_of_few_bits_has_no_rounded_self() -> None:
    with pytest.raises(UnsupportedModel, match=r"its file has \d\.\d bits a weight, rounded to fewer"):
        Engine(target("q4_k_m"), "self")


@cache
def dequantised(mix: str) -> Any:
    """The model of a file with its matrices in float32."""
    own = GgufFile(file_of(mix)).model("float32")
    weights = {
        f"{name}.weight": module.packed.unpack()
        for name, module in own.named_modules()
        if hasattr(module, "packed")
    }
    weights |= {name: weight.detach() for name, weight in own.named_parameters()}
    weights["model.embed_tokens.weight"] = own.model.embed_tokens(torch.arange(128))
    model = LlamaForCausalLM(own.config).eval()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("mix", MIXES)
def test_losses_are_those_of_the_dequantised_model(mix: str) -> None:
    model = dequantised(mix)
    text = torch.randint(128, (1, 300), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        right, found = (one(text, labels=text).loss for one in (model, of_file_model(mix)))
    assert abs(float(found) - float(right)) < 0.01 * max(1.0, float(right))


def of_file_model(mix: str) -> Any:
    return GgufFile(file_of(mix)).model("bfloat16")
