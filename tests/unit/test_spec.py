"""Spec strings: their meaning, nested or of other packages, and the messages about mistakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outpace.core import OutpaceError
from outpace.drafters import load_drafter
from outpace.drafters.combined.combined import Combined
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.plugins import installed, package_of
from outpace.spec import load
from outpace.verify import load_verifier
from outpace.verify.match import Match


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
        ("many:()", "a pair of parentheses of parts is empty"),
        ("many:(leaf)+( )", "a pair of parentheses of parts is empty"),
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


@pytest.mark.parametrize(
    ("spec", "same"),
    [
        ('{"method": "leaf"}', "leaf"),
        (' {"number": -1, "method": "leaf", "text": "a(b,c)"} ', "leaf:number=-1,text=a(b,c)"),
        (
            '{"method": "many", "parts": [{"method": "leaf", "number": 1}, "leaf"], "number": 3}',
            "many:(leaf:number=1)+(leaf),number=3",
        ),
        ('{"method": "many", "parts": ["leaf:number=1"]}', "many:(leaf:number=1)"),
        (
            '{"method": "pair", "first": {"method": "many", "parts": ["leaf"]}, "second": null}',
            "pair:(many:(leaf)),second=none",
        ),
        ('{"method": "row", "numbers": [2, 4, -1]}', "row:numbers=2+4+-1"),
    ],
)
def test_a_spec_in_json(spec: str, same: str) -> None:
    assert read(spec) == read(same)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ('{"method": "leaf"', 'is no JSON .*; a spec in JSON is as in {"method": "lookahead", "window": 7}'),
        ('{"window": 7}', "a spec in JSON names one method, as in"),
        ('{"method": 7}', "a spec in JSON names one method"),
        ('{"method": "many", "parts": [{}]}', "a spec in JSON names one method"),
        ('{"a": ' * 100_000, "is no JSON"),
        ('{"method": "leaf", "text": "a,b"}', "text: 'a,b' cannot be given in a spec, since it has a comma"),
        ('{"method": "leaf", "text": "a)("}', r"text: 'a\)\(' cannot be given"),
        ('{"method": "leaf", "numbr": 1}', "leaf has no option 'numbr'; it has: number, text"),
        ('{"method": "leaf", "number": 1.5}', "leaf: number must be a whole number, not '1.5'"),
        ('{"method": "leaf", "number": true}', "leaf: number must be a whole number, not 'true'"),
        ('{"method": "leaf", "number": 1, "number": 2}', "option 'number' is given twice"),
        ('{"method": "lea"}', "no thing 'lea'. Did you mean 'leaf'"),
        ('{"method": "many"}', "many needs parts"),
        ('{"method": "many", "parts": "leaf"}', "each thing in parentheses"),
        ('{"method": "pair", "first": ["leaf", "leaf"]}', "first takes one thing, not 2"),
    ],
)
def test_a_mistake_in_json_is_named(spec: str, message: str) -> None:
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


# -- classes of other packages ---------------------------------------------------------------------------

MODULE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outpace.drafters import Drafter
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.verify.match import Match

if TYPE_CHECKING:
    from nowhere import Missing


@dataclass(frozen=True)
class Mine(PromptLookup):
    window: int = 2

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError("window must be at least 0")


@dataclass(frozen=True)
class Own(Match):
    strength: float = 1.0


@dataclass(frozen=True)
class Unreadable(PromptLookup):
    missing: Missing | None = None


@dataclass(frozen=True)
class Abstract(Drafter):
    pass


class Undecorated(PromptLookup):
    window: int = 2


class Other:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package on the path, and one that registers entry points."""
    folder = tmp_path / "their_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "drafting.py").write_text(MODULE, "utf-8")
    (folder / "broken.py").write_text("import no_such_dependency\n", "utf-8")
    (folder / "raising.py").write_text("raise RuntimeError('their own fault')\n", "utf-8")
    (tmp_path / "single_module.py").write_text(MODULE, "utf-8")
    info = tmp_path / "their_dist-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-dist\nVersion: 1.2\n", "utf-8")
    (info / "entry_points.txt").write_text(
        "[outpace.drafters]\n"
        "theirs = their_package.drafting:Mine\n"
        "cracked = their_package.broken:Mine\n"
        "gone = their_package.drafting:Gone\n"
        "lookahead = their_package.drafting:Mine\n"
        "[outpace.verifiers]\n"
        "own = their_package.drafting:Own\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "their_package"
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("their_package", "single_module")
    ]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        ("their_package.drafting:Mine", 2),
        ("their_package.drafting:Mine:window=3", 3),
        (" their_package.drafting : Mine : window = 3 , branches = 1 ", 3),
        ("single_module:Mine:window=4", 4),
        ("theirs", 2),
        ("theirs:window=5", 5),
    ],
)
def test_a_drafter_of_another_package(package: str, spec: str, window: int) -> None:
    drafter = load_drafter(spec)
    assert (type(drafter).__name__, drafter.window) == ("Mine", window)  # type: ignore[attr-defined]


def test_a_drafter_of_another_package_nests(package: str) -> None:
    drafter = load_drafter("combined:(their_package.drafting:Mine:window=3)+(theirs)+(suffix),max_nodes=9")
    assert isinstance(drafter, Combined) and drafter.max_nodes == 9
    assert [type(part).__name__ for part in drafter.parts] == ["Mine", "Mine", "Suffix"]


def test_a_verifier_of_another_package(package: str) -> None:
    for spec in ("their_package.drafting:Own:strength=2", "own:strength=2"):
        verifier = load_verifier(spec)
        assert isinstance(verifier, Match) and str(verifier) == "match:strength=2.0"


def test_our_own_names_come_first_and_nothing_is_imported_for_them(package: str) -> None:
    assert isinstance(load_drafter("lookahead"), Lookahead)
    assert not any(name.startswith(package) for name in sys.modules)
    assert package_of(installed("drafters")["theirs"]) == "their-dist 1.2"
    assert not any(name.startswith(package) for name in sys.modules)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("their_package.nothing:Mine", "there is no module 'their_package.nothing' for the drafter"),
        ("no_such_package.drafting:Mine", "there is no module 'no_such_package' .* PYTHONPATH"),
        (
            "their_package.drafting",
            "is a module; name a drafter in it, as in their_package.drafting:ClassName",
        ),
        ("their_package.drafting:window=3", "is a module; name a drafter in it"),
        ("their_package.drafting:Gone", "cannot be imported: AttributeError: .*'Gone'"),
        (
            "their_package.drafting:Other",
            "Other is not a drafter: .* derives from outpace.drafters.base.Drafter",
        ),
        ("their_package.drafting:Own", "Own is not a drafter"),
        ("their_package.drafting:dataclass", "dataclass is not a drafter"),
        (
            "their_package.drafting:Undecorated",
            r"is not a dataclass; put @dataclass\(frozen=True\) before it",
        ),
        (
            "their_package.drafting:Unreadable",
            "their_package.drafting:Unreadable: name 'Missing' is not defined",
        ),
        ("their_package.drafting:Abstract", "their_package.drafting:Abstract: Can't instantiate abstract"),
        ("their_package.drafting:Mine:windows=3", "has no option 'windows'; it has: .*window"),
        ("their_package.drafting:Mine:window=x", "Mine: window must be a whole number, not 'x'"),
        ("their_package.drafting:Mine:window=-1", "Mine: window must be at least 0"),
        ("their_package.broken:Mine", "cannot be imported: ModuleNotFoundError: .*'no_such_dependency'"),
        ("their_package.raising:Mine", "cannot be imported: RuntimeError: their own fault"),
        ("cracked", r"'cracked' of their-dist 1\.2 cannot be imported: .*'no_such_dependency'"),
        ("gone", r"'gone' of their-dist 1\.2 cannot be imported: AttributeError"),
        ("thiers", "no drafter 'thiers'. Did you mean 'theirs'.* There are: .*lookahead.*theirs"),
        ("lokahead:window", "no drafter 'lokahead'. Did you mean 'lookahead'"),
        ("./drafting.py:Mine", "no drafter './drafting.py'"),
    ],
)
def test_a_mistake_with_another_package(package: str, spec: str, message: str) -> None:
    with pytest.raises(OutpaceError, match=message):
        load_drafter(spec)


def test_a_path_that_is_not_a_verifier(package: str) -> None:
    with pytest.raises(OutpaceError, match=r"Mine is not a verifier: .*outpace\.verify\.base\.Verifier"):
        load_verifier("their_package.drafting:Mine")


def test_two_packages_with_one_name(package: str, tmp_path: Path) -> None:
    info = tmp_path / "rival-3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 3\n", "utf-8")
    (info / "entry_points.txt").write_text("[outpace.drafters]\ntheirs = rival:Theirs\n", "utf-8")
    with pytest.raises(OutpaceError, match=r"two packages register 'theirs' in outpace.drafters: .*rival 3"):
        load_drafter("theirs")
    assert isinstance(load_drafter("lookahead"), Lookahead)


def test_tables_of_our_own_take_no_paths(package: str) -> None:
    with pytest.raises(OutpaceError, match=r"no thing 'their_package\.drafting'"):
        read("their_package.drafting:Mine")


@pytest.mark.parametrize(
    ("spec", "option", "most"),
    [
        ("lookahead", "window", 1024),
        ("lookahead", "ngram", 128),
        ("jacobi", "num_speculative_tokens", 4096),
        ("token_recycling", "max_nodes", 4096),
        ("prompt_lookup", "max_ngram", 65536),
        ("reference", "max_ngram", 65536),
    ],
)
def test_an_option_with_which_a_step_would_take_minutes(spec: str, option: str, most: int) -> None:
    """Specs come from files too: a profile's."""
    load_drafter(f"{spec}:{option}={most}")
    for value in (most + 1, 10**12):
        with pytest.raises(OutpaceError, match=f"{spec}: {option} must be at most {most}, not {value}"):
            load_drafter(f"{spec}:{option}={value}")
