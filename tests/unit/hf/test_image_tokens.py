"""Image tokens as output: a model of one vocabulary of words and image tokens draws a picture losslessly.

Emu3 (as Chameleon before it) emits a picture as rows of image tokens, each row ended by a token of its own:
the caller says which tokens are allowed at which place, and samples among the top k.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import outpace
from zoo.family import randomise

PROMPT = [[5, 9, 14, 3, 60]]  # 60 begins a picture
IMAGE, LINE, END = list(range(64, 96)), 61, 62
WIDTH, HEIGHT = 6, 5
SIZE = (WIDTH + 1) * HEIGHT + 1


def build() -> Any:
    config = transformers.Emu3TextConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
    )
    model = transformers.Emu3ForCausalLM(config).double().eval()
    randomise(model, 0)
    return model


def allowed(batch: int, text: torch.Tensor) -> list[int]:
    """The tokens of a picture by their place, as Emu3's processor states them."""
    place = len(text) - len(PROMPT[0])
    if place >= SIZE - 1:
        return [END]
    return [LINE] if place % (WIDTH + 1) == WIDTH else IMAGE


def picture(model: Any, seed: int | None) -> list[int]:
    options: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        options = {"do_sample": True, "top_k": 8}
    given = {"max_new_tokens": SIZE, "prefix_allowed_tokens_fn": allowed, **options}
    found: list[int] = model.generate(torch.tensor(PROMPT), **given)[0, len(PROMPT[0]) :].tolist()
    return found


def check(tokens: list[int]) -> None:
    rows = [tokens[at : at + WIDTH + 1] for at in range(0, SIZE - 1, WIDTH + 1)]
    assert len(rows) == HEIGHT and tokens[-1] == END and len(tokens) == SIZE
    assert all(row[-1] == LINE and set(row[:-1]) <= set(IMAGE) for row in rows)


@pytest.mark.parametrize("drafter", ["lookahead:window=4,ngram=3,guesses=4", "suffix", "token_recycling"])
def test_a_picture_is_that_of_plain_decoding(drafter: str) -> None:
    greedy = picture(build(), None)  # by transformers itself
    check(greedy)
    plain = outpace.accelerate(build(), "none")
    fast = outpace.accelerate(build(), drafter, adaptive=False)
    widths: list[int] = []
    embedded = fast.model.embed_tokens
    hook = embedded.register_forward_hook(lambda _, given, __: widths.append(given[0].shape[1]))
    assert picture(fast, None) == greedy
    assert max(widths[1:]) > 1  # after the prompt, so with drafts
    hook.remove()
    for seed in range(2):
        drawn = picture(fast, seed)
        check(drawn)
        assert drawn == picture(plain, seed) != picture(plain, seed + 1)
