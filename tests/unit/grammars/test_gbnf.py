"""GBNF as Lark: the same texts as in llama.cpp, by a reader of single characters, or a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import llguidance
import pytest

from outpace.core import OutpaceError
from outpace.grammars.gbnf import Node, _Reader, lark_of

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# space
ws ::= | " " | "\n" [ \t]{0,20}
"""
SHORT = [  # grammars of texts of a, b and parentheses
    'root ::= [a-b]+ "b"',
    'root ::= ("a" | "ab") "bb"',
    'root ::= "a"{2,3} "b"? | "b"{2}',
    'root ::= x | y\nx ::= "a" y?\ny ::= "b" "b"*',
    'root ::= "ab"* [^b]',
    'root ::= "a"\n | "b"\n',
    'root ::= (\n  "a" # one\n  | "b"\n)+',
    'root ::= "(" root ")" | [ab]+ "b"',
    'root ::= "(" root ")" root? | "a"',
    'root ::= list\nlist ::= item | item "(" list\nitem ::= "a" | "ab"',
    'root ::= "a" root "b" |',
    'root ::= ("(" root ")")* "a"?',
    'root ::= x "(" root ")" | "b"\nx ::= "a"*',
]
AMBIGUOUS = [  # a lexeme would be read past its end
    'root ::= "(" root ")" | x "b" root?\nx ::= [ab]+',
    'root ::= a root | "b"\na ::= "a"+',
    'root ::= x root | ")"\nx ::= "a" | "ab" | "bb"',
]
WRONG = {
    'r ::= "a"': "no rule root",
    "root ::= y": "no rule y",
    'root = "a"': "::= is expected",
    'root ::= "a': "does not end",
    "root ::= [a": "does not end",
    'root ::= ("a"': ") is expected",
    'root ::= "a")': "is not expected",
    "root ::= [z-a]": "reversed",
    'root ::= "\\q"': "is no escape",
    'root ::= "\\u12"': "is no character",
    'root ::= "a"{5000}': "at most 1000",
    'root ::= "a"{3,2}': "in order",
    "root ::= <think>": "a name is expected",
    'root ::= "a"\nroot ::= "b"': "a second rule",
    "root ::= " + "(" * 99 + '"a"' + ")" * 99: "in one another",
}


def matcher(lark: str) -> llguidance.LLMatcher:
    tokenizer = llguidance.LLTokenizer("byte")
    found = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not found.is_error(), (lark, found.get_error())
    return found


def accepts(start: llguidance.LLMatcher, text: str) -> bool:
    one, data = start.deep_copy(), list(text.encode())
    return one.try_consume_tokens(data) == len(data) and one.is_accepting()


def ends(rules: dict[str, Node], node: Node, text: str, start: int) -> Iterator[int]:
    """Where what a part allows may end in a text: llama.cpp's reading, character by character."""
    if node.kind == "set":
        if start < len(text) and any(a <= ord(text[start]) <= b for a, b in node.chars):
            yield start + 1
    elif node.kind == "ref":
        yield from ends(rules, rules[node.name], text, start)
    elif node.kind == "alt":
        for part in node.parts:
            yield from ends(rules, part, text, start)
    elif node.kind == "seq":
        places = {start}
        for part in node.parts:
            places = {end for place in places for end in ends(rules, part, text, place)}
        yield from places
    else:
        places, count = {start}, 0
        while places:
            if count >= node.least:
                yield from places
            count += 1
            if node.most is not None and count > node.most:
                return
            places = {end for at in places for end in ends(rules, node.parts[0], text, at) if end > at}


@pytest.mark.parametrize("grammar", SHORT)
def test_the_same_texts_are_allowed(grammar: str) -> None:
    rules, start = _Reader(grammar).rules(), matcher(lark_of(grammar))
    texts = ["".join(one) for size in range(6) for one in itertools.product("ab()", repeat=size)]
    allowed = [text for text in texts if len(text) in ends(rules, rules["root"], text, 0)]
    assert 0 < len(allowed) < len(texts)
    assert [text for text in texts if accepts(start, text)] == allowed


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_a_grammar_whose_lexemes_are_not_told_apart_is_refused(grammar: str) -> None:
    with pytest.raises(OutpaceError, match="the end of a part must be clear"):
        lark_of(grammar)


def test_a_grammar_of_json() -> None:
    start = matcher(lark_of(JSON))
    for text in ("{}", '{"a": 1, "b": [1, 2, {"c": "x\\n\\u00e9"}]}', '{"é":[]}', '{"a":-1.5e+3}'):
        assert accepts(start, text), text
    for text in ("[]", '{"a" 1}', '{"a": 01}', '{"a": "\n"}', '{"a": tru}', "{} {}"):
        assert not accepts(start, text), text


def test_characters() -> None:
    start = matcher(lark_of(r'root ::= "\u0041\x42\U00000043" [\u00e9-\u00ea] [^\]/] . "\t\\\""'))
    assert accepts(start, 'ABCé😀\n\t\\"')
    assert not accepts(start, 'ABCë😀\n\t\\"') and not accepts(start, 'ABCé/\n\t\\"')


def test_rules_that_double_one_another_stay_short() -> None:
    doubled = "\n".join(f"r{n} ::= r{n - 1} r{n - 1}" for n in range(1, 60))
    assert len(lark_of(f'root ::= r59\n{doubled}\nr0 ::= "x"')) < 4000


@pytest.mark.parametrize("grammar", WRONG)
def test_what_is_wrong_is_named(grammar: str) -> None:
    with pytest.raises(OutpaceError, match=WRONG[grammar].replace("(", r"\(").replace(")", r"\)")):
        lark_of(grammar)
