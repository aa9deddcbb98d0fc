"""Text between two tokenizers: the same pieces, growing texts, drafts translated back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from outpace.core import SamplingParams
from outpace.drafters.support.pieces import disagreement, pieces
from outpace.drafters.support.reading import GrowingTokens, TextReader, encode
from outpace.draws.noise import Key
from outpace.sequence import Sequence
from tokenizers_of import EOS, STORY, byte_level, sentencepiece_like

TARGET, OWN = byte_level(400), byte_level(330)


def reader_of(text: str, own: Any = OWN, target: Any = TARGET) -> tuple[Sequence, TextReader]:
    sequence = Sequence(encode(target, text), SamplingParams(), Key(0), limit=999)
    return sequence, TextReader(sequence, own, target)


def test_pieces_are_bytes_however_they_are_written() -> None:
    bytewise, charwise = pieces(byte_level(400)), pieces(sentencepiece_like(150))
    assert bytewise[b" the"] == TARGET.get_vocab()["\u0120the"]
    assert charwise[b" the"] == sentencepiece_like(150).get_vocab()["\u2581the"]
    assert charwise["\u00ef".encode()] == sentencepiece_like(150).get_vocab()["\u00ef"]
    assert bytewise[b"\xc3"] == TARGET.get_vocab()["\u00c3"]
    assert EOS in bytewise and EOS in charwise and EOS.encode() not in bytewise


def test_tokenizers_disagree_at_the_first_id_that_differs() -> None:
    assert disagreement(TARGET, TARGET) is None
    place, ours, theirs = disagreement(TARGET, byte_level(400, ("<|stop|>",))) or (9, "", "")
    assert (place, ours, theirs) == (0, EOS, "<|stop|>")
    # One that goes on where the other ends has no token that differs.
    assert disagreement(byte_level(330), byte_level(400)) is None


@pytest.mark.parametrize("tokenizer", [OWN, sentencepiece_like(150)], ids=["bytes", "chars"])
def test_a_growing_text_is_encoded_from_where_it_is_settled(tokenizer: Any) -> None:
    text = STORY.replace("\u2013", "-") * 3
    encoding, settled_before, calls = GrowingTokens(tokenizer), 0, []
    for end in range(5, len(text), 7):
        tokens, settled = encoding(text[:end])
        assert tokenizer.decode(tokens) == text[:end]
        assert settled >= settled_before
        settled_before = settled
        calls.append((tokens, settled))
    assert settled_before > 100
    # What was said to be settled never changed.
    for (earlier, _), (later, settled) in pairwise(calls):
        assert earlier[:settled] == later[:settled]
    # Most of it is what encoding the whole text gives.
    assert encoding(text)[0] == encode(tokenizer, text)


def test_the_text_is_read_token_by_token_and_says_what_stays() -> None:
    sequence, reader = reader_of("The mill")
    known: list[int] = []
    for token in encode(TARGET, "er walked down to the river" + STORY):
        tokens, unchanged = reader.read()
        assert tokens[:unchanged] == known[:unchanged] and unchanged <= len(known)
        assert OWN.decode(tokens) == TARGET.decode(sequence.tokens).rstrip("\N{REPLACEMENT CHARACTER}")
        known = list(tokens)
        sequence.append(token)


def test_special_tokens_of_both_are_taken_over_and_others_left_out() -> None:
    target, own = byte_level(400, (EOS, "<|user|>")), byte_level(330, ("<|bot|>", EOS))
    sequence, reader = reader_of(f"<|user|>walked{EOS} down", own, target)
    assert reader.read()[0] == [*encode(own, "walked"), own.get_vocab()[EOS], *encode(own, " down")]
    sequence.append(target.get_vocab()[EOS])
    tokens, unchanged = reader.read()
    assert tokens[-1] == own.get_vocab()[EOS] and unchanged > 0
    reader.revise(3)
    assert reader.read() == (tokens, 0)


@pytest.mark.parametrize("committed", ["The miller w", "The miller walked", "So the miller\u2019s d", "The"])
def test_a_draft_is_translated_to_just_its_text(committed: str) -> None:
    said = "alked down to the river"
    sequence, reader = reader_of(committed)
    reader.read()
    found = reader.translate(encode(OWN, said))
    assert TARGET.decode([*sequence.tokens, *found]) == committed + said
    assert reader.translate([]) == []


def test_nothing_is_drafted_within_a_character() -> None:
    sequence, reader = reader_of("na")
    sequence.append(TARGET.get_vocab()["\u00c3"])  # the first byte of one
    reader.read()
    assert reader.translate(encode(OWN, "ve")) == []
