"""Calls in the format of each family: read from pieces of any size, and forced by a grammar."""

from __future__ import annotations

import json
from itertools import product

import llguidance
import pytest
from pydantic_core import from_json

from calling import ARGUMENTS, CALLED, FUNCTIONS, IDS, JSON, READ, WRITTEN, nothing, pieces, read
from outpace.core import StreamedToken
from outpace.serve.answers import Answer, Manner
from outpace.serve.calls import CallFormat, NamedCalls, Tagged, closed, literal
from outpace.serve.dialogue import format_of
from outpace.serve.harmony import Harmony, HarmonyAnswer, one_call_each
from outpace.serve.marked import Dsml


@pytest.mark.parametrize(("form", "text", "template"), WRITTEN, ids=IDS)
def test_a_call_is_read_from_pieces_of_any_size(form: CallFormat, text: str, template: str) -> None:
    assert format_of(template) == form
    for forced, size in product((False, True), (1, 3, 7, 1000)):
        said = pieces(Answer(Manner(form, FUNCTIONS, forced), nothing), text, size)
        assert read(said) == ("", [("read", ARGUMENTS)]), (forced, size)
    if form.head("read") is not None:  # what is forced and is JSON comes as it is written
        answer = Answer(Manner(form, FUNCTIONS, True), nothing)
        assert len([one for one in pieces(answer, text, 4) if one.kind == "call"]) > 3
    if form.end:
        said = pieces(Answer(Manner(form, FUNCTIONS), nothing), f"Well.\n{text}\n{text}", 5)
        assert read(said) == ("Well.\n", [("read", ARGUMENTS)] * 2)
        alone = Manner(form, FUNCTIONS, parallel=False)
        assert len(read(pieces(Answer(alone, nothing), f"{text}\n{text}", 5))[1]) == 1


@pytest.mark.parametrize(
    ("form", "text"), [*((form, text) for form, text, _ in WRITTEN), (Harmony(), CALLED)]
)
def test_a_forced_call_that_is_cut_is_no_text(form: CallFormat, text: str) -> None:
    """There is a call once its name is written, and nothing before, as of OpenAI."""
    harmony = isinstance(form, Harmony)
    known = len(form.opening("read"))
    for functions in (FUNCTIONS, {"read": READ}):
        for cut in range(1, len(text), 2):
            answer = (HarmonyAnswer if harmony else Answer)(Manner(form, functions, True), nothing)
            said = pieces(answer, text[:cut], 50, complete=False)
            assert all(one.kind == "call" for one in said), (cut, said)
            assert [one.name for one in said if one.name is not None] == ["read"] * (cut >= known), cut
            written = "".join(one.text for one in said)
            if form.head("read") is not None:
                assert JSON.startswith(written) or written.startswith(JSON), (cut, written)
            else:
                assert from_json(written or "{}", allow_partial="trailing-strings").keys() <= ARGUMENTS.keys()
    assert len(written) > len(JSON) // 2


@pytest.mark.parametrize(("form", "text", "template"), WRITTEN, ids=IDS)
def test_what_is_no_call_is_text(form: CallFormat, text: str, template: str) -> None:
    begin = form.begin or "{"
    for wrong in (
        f"{begin} I think",
        f"a {begin[:3]} b",
        f"{begin}{form.end} and",
        f"{begin}x y{form.end}",
        "{}",
        "",
    ):
        for size in (1, 4):
            said = pieces(Answer(Manner(form, FUNCTIONS), nothing), wrong, size)
            assert read(said) == (wrong, []), (wrong, size)
    cut = text[: len(text) // 2]
    found, calls = read(pieces(Answer(Manner(form, FUNCTIONS), nothing), cut, 3, complete=False))
    assert (found, calls) == (cut, [])


@pytest.mark.parametrize(("form", "text", "template"), WRITTEN, ids=IDS)
def test_a_grammar_allows_the_call_and_no_other(form: CallFormat, text: str, template: str) -> None:
    grammar = form.grammar(list(FUNCTIONS.values()), literal)
    tokenizer = llguidance.LLTokenizer("byte")

    def taken(given: str) -> tuple[bool, bool]:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        data = list(given.encode())
        return matcher.try_consume_tokens(data) == len(data), matcher.is_stopped()

    assert taken(text) == (True, True)
    for old, new in (
        ("count", "other"),  # another key
        ("count", "path"),  # a key twice
        ("file", "link"),
        ("read", "write"),
        ('["x"', "[1"),
        ("[<", "[1,<"),
        ("3", "true"),
    ):
        if old in text and (wrong := text.replace(old, new, 1)) != text:
            assert not taken(wrong)[0], wrong


def test_several_calls_between_marks_say_which_values_are_texts() -> None:
    call = (
        '<｜DSML｜invoke name="other">\n<｜DSML｜parameter name="a" string="true">3</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    )
    found = Dsml().read(f"\n{call}{call}", {})
    assert [json.loads(one.arguments) for one in found] == [{"a": "3", "b": 3}] * 2


def test_a_text_ends_at_a_mark_that_is_a_token() -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    special = 255  # a byte that no text has stands for the mark
    grammar = Dsml().grammar([READ], lambda text: f"<[{special}]>")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    written = WRITTEN[[form for form, _, _ in WRITTEN].index(Dsml())][1]
    data: list[int] = []
    for part in written.split("｜DSML｜"):
        data += [*([special] if data else []), *part.encode()]
    assert matcher.try_consume_tokens(data) == len(data) and matcher.is_stopped()


def test_special_tokens_are_marks_where_they_stand() -> None:
    """Marks that are special tokens have no text; a step may emit several tokens, and text with them."""
    texts = {1: "", 2: "Well.", 3: "read", 4: "", 5: '{"path": "a"}', 6: " More"}
    manner = Manner(NamedCalls(), FUNCTIONS, marks={1: "[TOOL_CALLS]", 4: "[ARGS]"})
    tokens = [2, 1, 3, 4, 5]
    for cut in range(len(tokens) + 1):
        answer = Answer(manner, lambda ids: "".join(texts[one] for one in ids))
        said = []
        for part in (tokens[:cut], tokens[cut:]):
            text = "".join(texts[one] for one in part)
            said += answer.push([StreamedToken(one, 1, text if one == part[-1] else "") for one in part])
        assert read(said + answer.end(True)) == ("Well.", [("read", {"path": "a"})]), cut


@pytest.mark.parametrize("size", [1, 5, 100])
def test_reasoning_has_its_own_field(size: int) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for begun, text in ((False, "<think>\nHm.</think>\n\nYes."), (True, "\nHm.</think>\n\nYes.")):
        for rest, calls in (("", []), (f"\n{call}", [("now", {})])):
            answer = Answer(Manner(Tagged(), FUNCTIONS, thinks=True, begun=begun), nothing)
            said = pieces(answer, text + rest, size)
            assert "".join(one.text for one in said if one.kind == "reasoning") == "\nHm."
            assert read(said) == ("Yes." + rest[:1], calls)
    for text in ("<th", "<thin king", " Yes", "No <think>x</think>"):
        said = pieces(Answer(Manner(thinks=True), nothing), text, size)
        assert read(said) == (text, []) and all(one.kind == "text" for one in said)
    assert read(pieces(Answer(Manner(), nothing), "<think>a</think>b", size))[0] == "<think>a</think>b"


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"
HARMONY: list[
    tuple[str, str, str, int]
] = [  # an answer, its reasoning, its text, and the number of its calls
    (f"{ANALYSIS}{FINAL}", "Hm.", "Yes.", 0),
    (f"{ANALYSIS}<|start|>assistant{CALLED}<|call|>", "Hm.", "", 1),
    (f"{ANALYSIS}<|start|>assistant{CALLED}", "Hm.", "", 1),  # the token that ends a call has no text
    (f"{CALLED}<|call|><|start|>assistant{CALLED}<|call|>", "", "", 2),
    (f" to=functions.read<|channel|>commentary json<|message|>{JSON}<|call|>", "", "", 1),
    (f"<|channel|>commentary<|message|>First.<|end|><|start|>assistant{CALLED}", "", "First.", 1),
    ("<|channel|>final<|message|>a <| b<|return|>", "", "a <| b", 0),
    ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.", "Hm.", "Yes.", 0),
    ("<|channel|>analysis<|message|>Hm", "Hm", "", 0),
    ("Just a text.", "", "Just a text.", 0),
    ("<|channel|>final", "", "<|channel|>final", 0),
    (
        "<|channel|>commentary to=functions.read<|message|>{<|call|>",
        "",
        "<|channel|>commentary to=functions.read<|message|>{",
        0,
    ),
    ("", "", "", 0),
]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_channels_of_harmony(size: int) -> None:
    assert format_of("<|start|>assistant<|channel|>final<|message|>") == Harmony()
    for text, thought, said, calls in HARMONY:
        found = pieces(HarmonyAnswer(Manner(Harmony(), FUNCTIONS), nothing), text, size)
        assert "".join(one.text for one in found if one.kind == "reasoning") == thought, text
        assert read(found) == (said, [("read", ARGUMENTS)] * calls), text
    alone = HarmonyAnswer(Manner(Harmony(), FUNCTIONS, parallel=False), nothing)
    assert len(read(pieces(alone, HARMONY[3][0], size))[1]) == 1
    cut = HarmonyAnswer(Manner(Harmony(), FUNCTIONS), nothing)
    assert read(pieces(cut, CALLED[:-4], size, complete=False)) == (CALLED[:-4], [])
    none = HarmonyAnswer(Manner(), nothing)  # a request without tools
    assert read(pieces(none, f"{ANALYSIS}<|start|>assistant{CALLED}", size)) == (JSON, [])
    streamed = pieces(HarmonyAnswer(Manner(Harmony(), FUNCTIONS), nothing), HARMONY[0][0], 1)
    assert len([one for one in streamed if one.kind == "text"]) == 4  # as it comes


def test_a_forced_call_in_harmony() -> None:
    for size, end in product((1, 5, 1000), ("", "<|call|>")):
        if end and size < 1000:
            continue  # a token's text comes whole
        answer = HarmonyAnswer(Manner(Harmony(), FUNCTIONS, True), nothing)
        said = pieces(answer, CALLED, size) if not end else pieces(answer, CALLED + end, size)
        assert read(said) == ("", [("read", ARGUMENTS)])
    grammar = Harmony().grammar(list(FUNCTIONS.values()), literal)
    tokenizer = llguidance.LLTokenizer("byte")
    for text, allowed in (
        (CALLED, True),
        (CALLED.replace("functions.read", "functions.now"), False),
        (CALLED.replace('"count"', '"other"'), False),
        (ANALYSIS, False),
    ):
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        data = list(text.encode())
        assert (matcher.try_consume_tokens(data) == len(data)) is allowed, text


def test_marks_of_harmony_are_tokens() -> None:
    """Special tokens have no text, the one that ends the answer neither."""
    marks = {
        1: "<|channel|>",
        2: "<|message|>",
        3: "<|end|>",
        4: "<|start|>",
        5: "<|call|>",
        6: "<|constrain|>",
    }
    texts = {
        10: "analysis",
        11: "Hm.",
        12: "assistant",
        13: "commentary to=functions.now ",
        14: "json",
        15: "{}",
    }
    for forced, tokens in (
        (False, [1, 10, 2, 11, 3, 4, 12, 1, 13, 6, 14, 2, 15, 5]),
        (True, [1, 13, 6, 14, 2, 15, 5]),
    ):
        manner = Manner(Harmony(), FUNCTIONS, forced, marks=marks)
        answer = HarmonyAnswer(manner, lambda ids: "".join(texts.get(one, "") for one in ids))
        said = [
            one for token in tokens for one in answer.push([StreamedToken(token, 1, texts.get(token, ""))])
        ]
        assert read(said + answer.end(True)) == ("", [("now", {})]), forced


def test_a_conversation_for_harmony_has_one_call_in_a_turn() -> None:
    calls = [{"id": one, "type": "function", "function": {"name": "now", "arguments": "{}"}} for one in "ab"]
    results = [{"role": "tool", "tool_call_id": one, "content": one} for one in "ab"]
    turn = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.", "tool_calls": calls}
    first, second = ({"role": "assistant", "content": "", "tool_calls": [one]} for one in calls)
    user = {"role": "user", "content": "a"}
    found = one_call_each([user, turn, *results, user])
    assert found == [user, {**first, "thinking": "Hm.\nSo."}, results[0], second, results[1], user]
    single = {**turn, "tool_calls": calls[:1]}
    assert one_call_each([single, results[0]]) == [{**first, "thinking": "Hm.\nSo."}, results[0]]


def test_objects_have_no_other_keys_unless_their_schema_says_so() -> None:
    inner = {"type": "object", "properties": {"a": {}}}
    assert closed(inner)["additionalProperties"] is False
    open_ = {**inner, "additionalProperties": True}
    assert closed(open_) == open_ and closed({"type": "object"}) == {"type": "object"}
    nested = closed({"properties": {"b": {"items": inner}, "c": {"anyOf": [inner]}}, "$defs": {"d": inner}})
    assert json.dumps(nested).count("additionalProperties") == 4
    combined = {"allOf": [inner, {"properties": {"b": {}}}]}
    assert closed(combined) == combined
