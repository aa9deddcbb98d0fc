"""Spec strings that nest: what they describe, and what is said about a mistake."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import OutpaceError
from outpace.spec import load


class Thing:
    pass


@dataclass(frozen=True)
class Leaf(Thing):
    number: int = 0
    text: str = ""


@dataclass(frozen=True)
class Pair(Thing):
    first: Thing
    second: Leaf | None = None


@dataclass(frozen=True)
class Many(Thing):
    parts: tuple[Thing, ...]
    number: int = 0


@dataclass(frozen=True)
class Row(Thing):
    numbers: tuple[int, ...] = ()
    either: str | tuple[int, ...] = ()


TABLE: dict[str, type[Thing]] = {"leaf": Leaf, "pair": Pair, "many": Many, "row": Row}


def read(spec: str) -> Thing:
    return load("thing", TABLE, spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("many:(leaf)", Many((Leaf(),))),
        ("many:(leaf:number=1,text=a)+(leaf)", Many((Leaf(1, "a"), Leaf()))),
        ("many:parts=(leaf)+(leaf:number=1),number=3", Many((Leaf(), Leaf(1)), 3)),
        ("many:number=3,(leaf)", Many((Leaf(),), 3)),
        (" many : ( leaf : number = 1 ) + ( leaf ) , number = 3 ", Many((Leaf(1), Leaf()), 3)),
        ("pair:(leaf:number=1)", Pair(Leaf(1))),
        ("pair:first=(leaf),second=(leaf:number=2)", Pair(Leaf(), Leaf(2))),
        ("pair:first=(leaf),second=none", Pair(Leaf())),
        ("many:(many:(leaf)+(pair:(leaf))),number=1", Many((Many((Leaf(), Pair(Leaf()))),), 1)),
        ("leaf:text=a(b,c=d)+e", Leaf(0, "a(b,c=d)+e")),
        ("row:numbers=2+ 4+-1", Row((2, 4, -1))),
        ("row:numbers=7,either=2+4", Row((7,), "2+4")),
    ],
)
def test_what_a_spec_describes(spec: str, expected: Thing) -> None:
    assert read(spec) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("row:numbers=2/4", "numbers must be whole numbers, as in 2.4.5, not '2/4'"),
        ("row:numbers=2+", "numbers must be whole numbers"),
        ("many:(leaf", "parentheses do not match in 'many:.leaf'"),
        ("many:leaf)", "parentheses do not match"),
        ("many:)leaf(", "parentheses do not match"),
        ("leaf:text=:)", "parentheses do not match"),
        ("many:()", "nothing in a pair of parentheses of parts"),
        ("many:(leaf)+( )", "nothing in a pair of parentheses of parts"),
        ("many:(leaf)+", r"each thing in parentheses, as in parts=\(THING\)\+\(THING\)"),
        ("many:(leaf)++(leaf)", "each thing in parentheses"),
        ("many:(leaf)(leaf)", "each thing in parentheses"),
        ("many:(leaf)x", "each thing in parentheses"),
        ("many:parts=leaf", "each thing in parentheses"),
        ("many:leaf", r"a thing goes in parentheses, as in many:\(leaf\)"),
        ("many:leaf+leaf", r"in parentheses, as in many:\(leaf\)\+\(leaf\), not"),
        ("many:leaf:number=1", "many has no option 'leaf:number'; it has: parts, number"),
        ("many", r"many needs parts, as in many:parts=\(THING\)\+\(THING\)"),
        ("many:parts", r"'parts' needs a value, as in parts=\(THING\)\+\(THING\)"),
        ("many:parts=", r"'parts' needs a value"),
        ("pair", r"pair needs first, as in pair:first=\(THING\)"),
        ("pair:(leaf)+(leaf)", "first takes one thing, not 2"),
        ("pair:(leaf),second=(many:(leaf))", "second takes a Leaf, and .many:.leaf.. is not one"),
        ("many:(lea)", "no thing 'lea'. Did you mean 'leaf'"),
        ("many:(leaf:numbr=1)", "leaf has no option 'numbr'"),
        ("many:(leaf:number=x)", "leaf: number must be a whole number"),
        ("many:(leaf),(leaf)", "option 'parts' is given twice"),
        ("leaf:number=1,number=2", "option 'number' is given twice"),
        ("(leaf)", "no thing '.leaf.'"),
    ],
)
def test_a_mistake_is_named(spec: str, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        read(spec)


def render(thing: Thing) -> str:
    if isinstance(thing, Leaf):
        return f"leaf:number={thing.number}" + (f",text={thing.text}" if thing.text else "")
    if isinstance(thing, Pair):
        second = "none" if thing.second is None else f"({render(thing.second)})"
        return f"pair:first=({render(thing.first)}),second={second}"
    assert isinstance(thing, Many)
    return f"many:{'+'.join(f'({render(part)})' for part in thing.parts)},number={thing.number}"


texts = st.recursive(
    st.text("ab:=+ .", max_size=4),
    lambda inner: st.builds("{}({},{})".format, st.just("c"), inner, inner),
    max_leaves=3,
).map(str.strip)
leaves = st.builds(Leaf, st.integers(-5, 5), texts)
things = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Pair, inner, st.none() | leaves),
        st.builds(Many, st.lists(inner, min_size=1, max_size=3).map(tuple), st.integers(0, 9)),
    ),
    max_leaves=6,
)


@given(things)
def test_what_is_written_is_read(thing: Thing) -> None:
    assert read(render(thing)) == thing


@given(st.text("leafmnypir:()+=,12", max_size=24))
def test_nonsense_is_refused_and_nothing_else_happens(spec: str) -> None:
    try:
        assert isinstance(read(spec), Thing)
    except OutpaceError as error:
        assert str(error)
