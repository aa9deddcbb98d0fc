"""Text as tokens arrive."""

from __future__ import annotations

import pytest

from outpace.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; an unfinished character decodes to U+FFFD, as in byte-level BPE."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def _feed(stream: TextStream, text: str) -> list[str]:
    pieces = []
    for byte in text.encode():
        stopped = stream.push(byte)
        pieces.append(stream.release(final=stopped))
        if stopped:
            break
    return pieces


def test_text_is_the_whole_decoding() -> None:
    stream = TextStream(Bytes())
    assert "".join(_feed(stream, "naïve – 東京 🙂!")) == stream.text == "naïve – 東京 🙂!"


def test_a_character_is_shown_when_it_is_complete() -> None:
    assert _feed(TextStream(Bytes()), "é") == ["", "é"]


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    stream = TextStream(Bytes())
    stream.push(0xC3)
    assert stream.release() == ""
    assert stream.release(final=True) == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_is_found_across_tokens_and_cut() -> None:
    stream = TextStream(Bytes(), ["\nUser:"])
    pieces = _feed(stream, "hello\nUser: more")
    assert stream.stopped and stream.text == "hello" == "".join(pieces)


def test_text_that_could_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(Bytes(), ["stop"])
    assert _feed(stream, "a sto") == ["a", " ", "", "", ""]
    assert _feed(stream, "ry") == ["stor", "y"]


def test_the_longest_possible_beginning_is_held_back() -> None:
    stream = TextStream(Bytes(), ["abab!", "b!x"])
    _feed(stream, "zabab")
    assert stream._shown == 1


def test_what_was_held_back_is_released_at_the_end() -> None:
    stream = TextStream(Bytes(), ["stop"])
    shown = "".join(_feed(stream, "a sto"))
    assert shown + stream.release(final=True) == "a sto"


@pytest.mark.parametrize("stops", [["b", "abc"], ["abc", "b"]])
def test_the_stop_string_completed_first_ends_the_text(stops: list[str]) -> None:
    stream = TextStream(Bytes(), stops)
    _feed(stream, "xabc")
    assert stream.text == "xa"


class Words:
    """One token may hold several characters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(["one ", "END more", "x", "ENDING"][t] for t in token_ids)


def test_a_stop_string_in_the_middle_of_a_token_cuts_there() -> None:
    stream = TextStream(Words(), ["END"])
    assert not stream.push(0)
    assert stream.push(1)
    assert stream.text == "one "


@pytest.mark.parametrize(
    ("stops", "text"), [(["END m", "ND"], "one E"), (["ND", "END m"], "one E"), (["D", "ND", "END"], "one ")]
)
def test_which_stop_string_ends_the_text_does_not_depend_on_its_tokens(stops: list[str], text: str) -> None:
    words, letters = TextStream(Words(), stops), TextStream(Bytes(), stops)
    words.push(0)
    assert words.push(1) and words.text == text
    _feed(letters, "one END more")
    assert letters.text == text


class Counting(Bytes):
    """Counts what is decoded."""

    calls = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        self.calls += 1
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_nothing_is_decoded_before_the_text_is_asked_for() -> None:
    tokenizer = Counting()
    stream = TextStream(tokenizer)
    for byte in "naïve 東京".encode():
        assert not stream.push(byte)
    assert tokenizer.calls == 0
    assert stream.text == "naïve 東京" == stream.release()
    assert tokenizer.calls == 2 and not stream.pending
    stream.push(0xC3)
    assert stream.pending and stream.text == "naïve 東京"
    assert tokenizer.calls == 4


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_the_text_does_not_depend_on_when_it_is_asked_for(chunk: int) -> None:
    stream, shown, data = TextStream(Bytes()), "", "naïve – 東京 🙂!".encode()
    for start in range(0, len(data), chunk):
        for byte in data[start : start + chunk]:
            stream.push(byte)
        shown += stream.release()
    assert shown == stream.text == data.decode()
