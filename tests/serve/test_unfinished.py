"""Calls as models write them: with marks in their texts, types to be found, and parts that are missing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from calling import ARGUMENTS, WRITTEN, nothing, pieces, read
from outpace.serve.answers import Answer, Manner, Said
from outpace.serve.calls import Bare, CallFormat, DeepSeek, Listed, NamedCalls, Tagged
from outpace.serve.harmony import Harmony, HarmonyAnswer
from outpace.serve.json_calls import Signature
from outpace.serve.marked import Coder, Dsml, Gemma, Glm

TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "line": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
        "flag": {"type": "boolean"},
        "told": {"$ref": "#/$defs/word"},
        "deep": {"anyOf": [{"anyOf": [{"$ref": "#/$defs/word"}]}, {"$ref": "#/$defs/none"}]},
        "all": {"allOf": [{"$ref": "#/$defs/word"}, {"description": "x"}]},
        "size": {"type": "number"},
        "some": {"type": "object"},
        "one": {"enum": ["1", 2]},
        "any": {},
    },
    "$defs": {"word": {"type": "string"}, "none": {"type": "null"}},
}
FUNCTIONS = {
    "read": Signature("read", TYPED),
    "now": Signature("now", {"type": "object", "properties": {}}),
}
NOW: list[tuple[str, Any]] = [("now", {})]
X: list[tuple[str, Any]] = [("read", {"path": "x"})]


def said_of(form: CallFormat, text: str, complete: bool = True, **more: Any) -> list[Said]:
    """What an answer says, the same in pieces of any size."""
    kind = HarmonyAnswer if isinstance(form, Harmony) else Answer
    found = [
        pieces(kind(Manner(form, FUNCTIONS, **more), nothing), text, size, complete) for size in (1, 3, 1000)
    ]
    assert len({repr((read(one), thought(one))) for one in found}) == 1, found
    return found[0]


def thought(said: list[Said]) -> str:
    return "".join(one.text for one in said if one.kind == "reasoning")


TOOL = "<tool_call>\n{}\n</tool_call>"
QUOTED = [
    (Tagged(), TOOL.format('{"name": "read", "arguments": {"path": "MARK"}}'), "</tool_call> <tool_call>"),
    (Tagged(), TOOL.format('{"name": "read", "arguments": {"path": "MARK"}}'), '\\" </tool_call> \\\\'),
    (
        DeepSeek(),
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>{"path": "MARK"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁end｜><｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>```json",
    ),
    (NamedCalls(), '[TOOL_CALLS]read[ARGS]{"path": "MARK"}', "[TOOL_CALLS]x[ARGS]{}"),
    (Listed(), '[TOOL_CALLS][{"name": "read", "arguments": {"path": "MARK"}}]', "[TOOL_CALLS][]"),
    (
        Harmony(),
        '<|channel|>commentary to=functions.read<|message|>{"path": "MARK"}<|call|>',
        "<|end|><|call|>",
    ),
    (
        Coder(),
        TOOL.format("<function=read>\n<parameter=path>\nMARK\n</parameter>\n</function>"),
        "a </tool_call> b </function> c </parameter> d",
    ),
    (
        Glm(),
        TOOL.format("read\n<arg_key>path</arg_key>\n<arg_value>MARK</arg_value>"),
        "a </tool_call> b </arg_value> c",
    ),
    (
        Dsml(),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n<｜DSML｜parameter name="path"'
        ' string="true">MARK</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "a </｜DSML｜function_calls> b </｜DSML｜invoke> c",
    ),
    (
        Gemma(),
        "<start_function_call>call:read{path:<escape>MARK<escape>}<end_function_call>",
        "a <end_function_call> b } c",
    ),
]


@pytest.mark.parametrize(("form", "text", "quoted"), QUOTED)
def test_a_mark_in_a_text_ends_nothing(form: CallFormat, text: str, quoted: str) -> None:
    written = text.replace("MARK", quoted)
    path = json.loads(f'"{quoted}"') if '"MARK"' in text else quoted
    times = 1 if isinstance(form, Harmony) else 2
    assert read(said_of(form, written * times)) == ("", [("read", {"path": path})] * times)


VALUES = [
    ("line", "12345", "12345"),
    ("line", "null", None),
    ("line", '"a"', '"a"'),
    ("count", "null", None),
    ("count", "7", 7),
    ("count", "7.0", 7),
    ("flag", "True", True),
    ("flag", "false", False),
    ("path", "null", "null"),
    ("told", "12", "12"),
    ("deep", "12", "12"),
    ("deep", "null", None),
    ("all", "12", "12"),
    ("size", "3", 3),
    ("size", "3.5", 3.5),
    ("some", "{'a': None, 'b': [True]}", {"a": None, "b": [True]}),
    ("some", '{"a": 1}', {"a": 1}),
    ("one", "1", "1"),
    ("one", "2", 2),
    ("any", "12", 12),
    ("any", "x y", "x y"),
    ("unknown", "true", True),
]


@pytest.mark.parametrize(("key", "written", "value"), VALUES)
def test_a_value_has_a_type_of_its_schema(key: str, written: str, value: Any) -> None:
    for form, text in (
        (Coder(), f"<function=read>\n<parameter={key}>\n{written}\n</parameter>\n</function>"),
        (Glm(), f"read\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>"),
    ):
        assert read(said_of(form, TOOL.format(text))) == ("", [("read", {key: value})]), form
    if not set(written) & set("{},'\" "):
        text = f"<start_function_call>call:read{{{key}:{written}}}<end_function_call>"
        assert read(said_of(Gemma(), text)) == ("", [("read", {key: value})])


CODER = "<function=read>\n<parameter=path>\nx\n</parameter>\n</function>"
UNFINISHED = [
    (Coder(), TOOL.format(CODER).replace("</parameter>\n", ""), X),
    (Coder(), TOOL.format(CODER).replace("</function>\n", ""), X),
    (Coder(), TOOL.format(CODER).replace("</parameter>\n</function>\n", ""), X),
    (Coder(), CODER, X),
    (Coder(), f"{CODER}\n</tool_call>", X),
    (Coder(), f"<tool_call>\n{CODER}", X),
    (Coder(), "<tool_call>\n<function=now>\n</tool_call>", NOW),
    (
        Coder(),
        TOOL.format("<function=read>\n<parameter=path>\nx\n<parameter=count>\n3\n</parameter>\n</function>"),
        [("read", {"path": "x", "count": 3})],
    ),
    (Glm(), TOOL.format("now"), NOW),
    (Glm(), TOOL.format("read\n<arg_key>path</arg_key>\n<arg_value>x"), X),
    (Glm(), "<tool_call>read<arg_key>path</arg_key><arg_value>x</arg_value>", X),
    (Tagged(), TOOL.format('{"name": "now"}'), NOW),
    (Tagged(), TOOL.format('{"name": "now", "arguments": ""}'), NOW),
    (Tagged(), '<tool_call>\n{"name": "now", "arguments": {}}', NOW),
    (Tagged(), '{"name": "now", "arguments": {}}\n</tool_call>', NOW),
    (Tagged(), '<tool_call>\n{"name": "now"}\n<tool_call>\n{"name": "now"}\n</tool_call>', NOW * 2),
    (Tagged(), '<tool_call>\n{"name": "now"}\n<tool_call>', NOW),
    (Tagged(), TOOL.format('```json\n{"name": "now"}\n```'), NOW),
    (Listed(), '[TOOL_CALLS]```json\n[{"name": "now"}]\n```', NOW),
    (Coder(), TOOL.format('{"name": "now", "arguments": {}}'), NOW),
    (Glm(), TOOL.format('{"name": "now", "arguments": {}}'), NOW),
    (Gemma(), '<start_function_call>call:read{"path":"x"}<end_function_call>', X),
    (NamedCalls(), "[TOOL_CALLS]now", NOW),
    (NamedCalls(), "[TOOL_CALLS]now[ARGS]", NOW),
    (NamedCalls(), '[TOOL_CALLS][{"name": "now", "arguments": {}}]', NOW),
    (DeepSeek(), "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", NOW),
    (DeepSeek(), "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>", NOW),
    (Dsml(), '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>', NOW),
    (Gemma(), "<start_function_call>call:now<end_function_call>", NOW),
    (Gemma(), "<start_function_call>call:now{}", NOW),
    (Harmony(), "<|channel|>commentary to=functions.now<|message|>", NOW),
    (Bare(), '<|python_tag|>{"name": "now"}', NOW),
    (Tagged(), TOOL.format('{"name": "read", "arguments": {"path": "x"}'), X),
    (Tagged(), TOOL.format('{"name": "read", "arguments": {"path": "x"'), X),
    (Tagged(), TOOL.format('{"name": "read", "arguments": {"path": "x"}}}'), X),
    (Tagged(), TOOL.format("{'name': 'read', 'arguments': {'path': 'x',}}"), X),
    (Bare(), '{"name": "read", "parameters": {"path": "x"}', X),
    (NamedCalls(), '[TOOL_CALLS]read[ARGS]{"path": "x"', X),
    (NamedCalls(), '[TOOL_CALLS]read[ARGS]{"path": "x"}}', X),
    (Harmony(), '<|channel|>commentary to=functions.read<|message|>{"path": "x"', X),
]


@pytest.mark.parametrize(("form", "text", "calls"), UNFINISHED)
def test_a_call_that_is_not_quite_complete(form: CallFormat, text: str, calls: Any) -> None:
    assert read(said_of(form, text)) == ("", calls)


@pytest.mark.parametrize("form", [Listed(), NamedCalls()])
def test_text_after_a_call_that_no_mark_ends(form: CallFormat) -> None:
    call = next(text for one, text, _ in WRITTEN if one == form)
    for after in ('"Now" I wait.', "It's done."):
        (text, calls) = read(said_of(form, f"So. {call}\n{after}"))
        assert (text, calls) == (f"So. {after}", [("read", ARGUMENTS)])


ALONE = '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize("form", [*(form for form, _, _ in WRITTEN), Harmony()])
def test_an_answer_that_is_a_call_without_marks(form: CallFormat) -> None:
    both = [("now", {}), ("read", {"path": "x"})]
    two = '[{"name": "now", "arguments": {}}, {"name": "read", "parameters": {"path": "x"}}]'
    for text, calls in (
        (ALONE, NOW),
        (f"```json\n{ALONE}\n```", NOW),
        (f"\n```\n{json.dumps(json.loads(ALONE), indent=2)}\n```\n", NOW),
        (two, both),
        (f"```json\n{two}\n```", both),
        ('{"type": "function", "function": {"name": "now", "arguments": "{}"}}', NOW),
        ('{"arguments": {}, "name": "now"}', NOW),
    ):
        assert read(said_of(form, text)) == ("", calls), text
        thinks = not isinstance(form, Harmony)
        begun = f"<think>Hm.</think>\n\n{text}" if thinks else text
        assert read(said_of(form, begun, thinks=thinks)) == ("", calls), text
    for text in (
        '{"name": "other", "arguments": {}}',
        '{"name": "now", "age": 3}',
        '{"a": 1}',
        f"```json\n{ALONE}\n```\nThat is it.",
        f"So: {ALONE}",
        '{"name": "no',
        "[1, 2]",
        "``",
    ):
        assert read(said_of(form, text)) == (text, []), text


def test_what_cannot_be_a_call_is_passed_on_as_it_comes() -> None:
    for text in ('{"a": 1, "b": 2}', "```python\nprint(1)\n```", '{"name": "other", "arguments": {}}'):
        said = pieces(Answer(Manner(Tagged(), FUNCTIONS), nothing), text, 1)
        assert len(said) > 5, text
    said = pieces(Answer(Manner(Tagged(), FUNCTIONS), nothing), "<tool_call> is a tag of calls", 1)
    assert len(said) > 5


def test_a_call_in_reasoning_that_nothing_ends() -> None:
    call = TOOL.format('{"name": "now"}')
    for text, expected, reasoning in (
        (f"<think>Hm. {call}", ("", NOW), "Hm. "),
        ("<think>A <tool_call> is a tag. </think>ok", ("ok", []), "A <tool_call> is a tag. "),
        (f"<think>So {call}? </think>ok", ("ok", []), f"So {call}? "),
        ('<think>Hm. <tool_call>\n{"name": "no', ("", []), 'Hm. <tool_call>\n{"name": "no'),
    ):
        said = said_of(Tagged(), text, thinks=True)
        assert (read(said), thought(said)) == (expected, reasoning), text


def test_arguments_can_be_sent() -> None:
    """NaN is no JSON, nor is what no number holds, and half a character cannot be written in UTF-8."""
    for wrong in ("NaN", "1e999", "[-1e999]"):
        nan = TOOL.format(f'{{"name": "now", "arguments": {{"a": {wrong}}}}}')
        assert read(said_of(Tagged(), nan)) == (nan, [])
    (call,) = (
        one for one in said_of(Tagged(), TOOL.format('{"name": "now", "arguments": {"a": "\\ud800"}}'))
    )
    assert call.text == '{"a": "\\ud800"}'


def test_a_broken_call_is_text_and_the_next_one_a_call() -> None:
    broken = TOOL.format('{"name": "now", oops "x}')
    good = TOOL.format('{"name": "now"}')
    assert read(said_of(Tagged(), f"{broken}\nthen {good}")) == (f"{broken}\nthen ", NOW)
