"""Write the generated parts of pages, and the packages' tables of methods (``outpace.catalogue``).

    python tools/reference.py

A part is between the lines `<!-- NAME: written by tools/reference.py -->` and `<!-- end -->`. What is written
comes from the classes, their docstrings, the command line's options and the families that tests cover.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

import outpace
from outpace.catalogue import FILE, attributes, described
from outpace.cli.app import app
from outpace.cli.drafters import shown
from outpace.core import SamplingParams, Speculation
from outpace.drafters import DRAFTERS
from outpace.learned.formats import FORMATS, UNTOLD, DrafterFormat
from outpace.plugins import installed
from outpace.targets.cpu.quants import TYPES
from outpace.targets.llamacpp.header import BLOCKS
from outpace.targets.native.recipe import RECIPES
from outpace.targets.stock.causal import CausalTarget
from outpace.verify import VERIFIERS

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
ALL = (*sorted(PAGES.glob("*.md")), ROOT / "docs" / "guides" / "gguf.md")  # with generated parts
_PART = re.compile(r"(<!-- ([a-z ]+): written by tools/reference\.py -->\n).*?(<!-- end -->)", re.DOTALL)


def cell(text: object) -> str:
    """A text as a cell of a table, in the marks of Markdown."""
    flat = " ".join(str(text).split()).replace("``", "`")
    return flat.replace("|", "\\|")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)).rstrip() + " |" for line in lines)


def entries() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Outpace's own drafters and verifiers: name, summary, paper and options of each."""
    return described_all(DRAFTERS), described_all(VERIFIERS)


def described_all(classes: Mapping[str, type[Any]]) -> list[dict[str, Any]]:
    return [described(name, classes[name]) for name in sorted(classes)]


def tables() -> dict[Path, str]:
    """The tables of methods, by their files, of the packages that are installed."""
    found = {}
    for package, root in (("outpace", ROOT / "src"), ("outpace_lab", ROOT / "lab" / "src")):
        kinds = {} if package != "outpace" else {"drafter": DRAFTERS, "verifier": VERIFIERS}
        for kind in ("drafter", "verifier", "observer"):
            points = installed(f"{kind}s").values()
            own = {one.name: one.load() for one in points if one.module.startswith(f"{package}.")}
            kinds |= {kind: own} if own else {}
        if kinds:
            text = {kind: described_all(classes) for kind, classes in kinds.items()}
            found[root / package / FILE] = json.dumps(text, indent=1, ensure_ascii=False) + "\n"
    return found


def methods(found: list[dict[str, Any]]) -> str:
    uses = any(own["when"] for own in found)
    head = ("name", "what it does", *(("when, and what it needs",) if uses else ()), "paper")
    rows = (
        [f"`{own['name']}`", own["summary"], *([_use(own)] if uses else []), own["paper"]] for own in found
    )
    return table(head, rows)


def _use(own: dict[str, Any]) -> str:
    return own["when"] + (f"; needs {own['needs']}" if own["needs"] else "")


def options(found: list[dict[str, Any]]) -> str:
    """A table of each method that has options."""
    parts = []
    for own in found:
        if own["options"]:
            rows = ((_spelled(one), one["description"]) for one in own["options"])
            parts.append(f"**`{own['name']}`**\n\n" + table(("option", "meaning"), rows))
    return "\n\n".join(parts)


def _spelled(option: dict[str, Any]) -> str:
    return f"`{option['name']}" + ("`" if option["required"] else f"={shown(option['default'])}`")


def fields(cls: type[Any]) -> str:
    """The fields of a dataclass, with their defaults and the descriptions of its docstring."""
    about = attributes(inspect.getdoc(cls) or "")
    rows = ((f"`{own.name}={own.default!r}`", about.get(own.name, "")) for own in dataclasses.fields(cls))
    return table(("option", "meaning"), rows)


def arguments(cls: type[Any]) -> str:
    """The arguments of a class, with their defaults and the descriptions of its docstring."""
    doc = (inspect.getdoc(cls) or "").replace("Args:", "Attributes:")
    about = attributes(doc)
    given = inspect.signature(cls).parameters.values()
    rows = (
        (f"`{own.name}={own.default!r}`", about.get(own.name, ""))
        for own in given
        if own.default is not own.empty
    )
    return table(("option", "meaning"), rows)


def families() -> str:
    """Every type of transformers that generates text: whether it is served, and what tests show it."""
    sys.path.insert(0, str(ROOT / "tests"))
    from zoo import every_type as zoo
    from zoo.tiny_families import CHAINED, SEVERAL_STATES, TINY

    rows: dict[str, tuple[str, str]] = {}  # type -> how it is served, the reason
    for kind, how in zoo.tested_elsewhere().items():
        rows[kind] = how, ""
    for kind in TINY:
        how = "chains" if kind in CHAINED else "trees"
        rows.setdefault(kind, (f"decoder-only, {how}", "random models, in float32"))
    for kind in zoo.TEXT_ALONE:
        how = "chains" if kind in CHAINED else "trees"
        why = "no test with sound" if kind in zoo.SOUND else "no test with images: the first image decides"
        if kind in zoo.STATEFUL_AS_PUBLISHED:
            how += "; no where a layer is recurrent"
            why = "its published layers are: load its language model by itself"
        rows.setdefault(kind, (f"text alone, {how}", why))
    for kind, why in {**zoo.REFUSED, **zoo.REFUSED_IN_PART}.items():
        part = " where a layer is recurrent" if kind in zoo.REFUSED_IN_PART else ""
        rows.setdefault(kind, (f"no{part}", zoo.TOLD.get(why, why)))
    for kind, why in zoo.NOT_TEXT.items():
        rows.setdefault(kind, ("no text", why))
    return table(
        ("family", "served", "drafters it excludes", "native on a CPU", "reason"),
        (
            [
                f"`{kind}`",
                how,
                _excluded(how, kind in SEVERAL_STATES),
                "yes" if kind in RECIPES else "",
                why,
            ]
            for kind, (how, why) in sorted(rows.items())
        ),
    )


def _excluded(how: str, unread: bool) -> str:
    """The drafters that a family's kind excludes.

    Args:
        unread: drafters cannot read the states of its layers.
    """
    excluded = ["those with trained parts"] * unread
    excluded += ["`lookahead` with a window"] * how.endswith("chains")
    if how.startswith("encoder-decoder"):
        excluded += ["`mtp`", "`assistant`"]
    return ", ".join(excluded)


def formats() -> str:
    """The formats of published drafters, and what reads each."""
    rows = [[one.name, one.shows, _reads(one.drafter), _why(one)] for one in FORMATS]
    rows += [[name, shows, _reads(drafter), ""] for name, shows, drafter in UNTOLD]
    return table(("format", "in its config.json", "read by", "why not, or what is not read"), rows)


def _reads(drafter: str) -> str:
    return f"`{drafter}`" if drafter in DRAFTERS else drafter or "no"


def _why(one: DrafterFormat) -> str:
    return f"{one.reason}; use {one.remedy}" if one.remedy else one.reason


def api() -> str:
    """Each public name with its signature and its docstring."""
    parts = []
    for name in sorted(outpace.__all__, key=str.lower):
        value = getattr(outpace, name)
        if inspect.ismodule(value) or not callable(value):
            continue
        parts.append(_described(f"## {name}", name, value))
        if inspect.isclass(value) and not issubclass(value, Exception):
            for own, method in vars(value).items():
                if inspect.isfunction(method) and not own.startswith("_") and method.__doc__:
                    parts.append(_described("", f"{name}.{own}", method))
    return "\n\n".join(parts)


def _described(title: str, name: str, value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, Exception):
        head = [title]
    else:
        head = (
            [title, f"```text\n{name}{_signature(value)}\n```"] if title else [f"### {name}{_brief(value)}"]
        )
    return "\n\n".join([*head, as_markdown(inspect.getdoc(value) or "")])


def _signature(value: Any) -> str:
    """A signature, with an argument per line if it is long."""
    given = [_argument(own) for own in inspect.signature(value).parameters.values() if own.name != "self"]
    short = "(" + ", ".join(given) + ")"
    return short if len(short) < 80 else "(\n" + "".join(f"    {own},\n" for own in given) + ")"


def _argument(own: inspect.Parameter) -> str:
    name = {own.VAR_POSITIONAL: "*", own.VAR_KEYWORD: "**"}.get(own.kind, "") + own.name
    kind = own.annotation if isinstance(own.annotation, str) else getattr(own.annotation, "__name__", "")
    if own.default is own.empty:
        return f"{name}: {kind}"
    simple = isinstance(own.default, (str, int, float, tuple)) or own.default is None
    return f"{name}: {kind} = {own.default!r}" if simple else f"{name}: {kind} = ..."


def _brief(value: Any) -> str:
    """The names of a method's arguments."""
    return "(" + ", ".join(name for name in inspect.signature(value).parameters if name != "self") + ")"


def as_markdown(doc: str) -> str:
    """A docstring with its sections as lists."""
    found: list[str] = []
    listed = False
    for line in doc.replace("``", "`").splitlines():
        if section := re.fullmatch(r"(Args|Attributes|Raises|Returns|Warns|Yields):", line):
            listed = True
            found += [f"{section[1]}:", ""]
        elif listed and (item := re.match(r"    ([\w, ]+): (.*)", line)):
            found.append(f"- `{item[1]}`: {item[2]}")
        elif listed and line.startswith("     "):
            found.append(f"  {line.strip()}")
        else:
            listed = listed and (not line or line.startswith(" "))
            found.append(line.strip() if listed else line)
    return "\n".join(found)


def commands() -> str:
    """Each command with its options."""
    return "\n\n".join(_commands(get_command(app), ("outpace",)))


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    shown = [own for own in command.params if not getattr(own, "hidden", False) and own.name != "help"]
    about = _plain(inspect.cleandoc(command.help or ""))
    if shown or not getattr(command, "commands", None):
        head = f"## {' '.join(path)}\n\n{about}"
        rows = ((_names(own), _plain(getattr(own, "help", None) or ""), _default(own)) for own in shown)
        yield head + ("\n\n" + table(("option", "meaning", "default"), rows) if shown else "")
    for name, below in sorted(getattr(command, "commands", {}).items()):
        home = getattr(below.callback, "__module__", "outpace")
        if home.partition(".")[0] == "outpace":  # other packages have pages of their own
            yield from _commands(below, (*path, name))


def _plain(text: str) -> str:
    """A help text without rich's marks."""
    return re.sub(r"\[/?(bold|dim|italic|cyan|green)\]", "`", text).replace("``", "`")


def _names(option: Any) -> str:
    if option.param_type_name == "argument":
        return f"`{(option.metavar or option.name).upper()}`"
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    value = option.default
    if value in (None, (), [], "", False) or callable(value):
        return ""
    return "on" if value is True else f"`{value}`"


def server() -> str:
    """Each path of the server that takes a body, with its fields; then the objects in them."""
    from outpace.serve.routes import Keys, Limits, make_app  # needs the extra serve

    schema = make_app(Keys([]), Limits()).openapi()
    bodies = {
        path: methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        for path, methods in schema["paths"].items()
        if "post" in methods
    }
    schemas = schema["components"]["schemas"]
    found = [_object(f"POST {path}", schemas[_named(body)]) for path, body in bodies.items()]
    waiting = list(bodies.values())
    seen = set(waiting)
    while waiting:
        for own in re.findall(r"#/components/schemas/\w+", str(schemas[_named(waiting.pop(0))])):
            if own not in seen:
                seen.add(own)
                waiting.append(own)
                found.append(_object(_named(own), schemas[_named(own)]))
    return "\n\n".join(found)


def _named(address: str) -> str:
    return address.rpartition("/")[2]


def _object(title: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", [])
    rows = (
        (f"`{name}`", _type(own), "required" if name in needed else _given(own.get("default")), _bounds(own))
        for name, own in schema["properties"].items()
    )
    return f"## {title}\n\n" + table(("field", "type", "default", "limits"), rows)


def _given(default: object) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _choices(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return [own for own in found if own.get("type") != "null"]


def _type(schema: dict[str, Any]) -> str:
    """The type of a field in words, with links to objects."""
    kinds = []
    for own in _choices(schema):
        if "$ref" in own:
            name = _named(own["$ref"])
            kinds.append(f"[{name}](#{name.lower()})")
        elif values := own.get("enum", [own["const"]] if "const" in own else []):
            kinds.append(", ".join(f"`{json.dumps(value)}`" for value in values))
        elif own.get("type") == "array":
            kinds.append(f"list of {_type(own['items'])}" if own.get("items") else "list")
        else:
            kinds.append(own.get("type", "any"))
    return " or ".join(kinds)


_BOUNDS = {
    "ge": "from {}", "minimum": "from {}", "exclusiveMinimum": "above {}", "le": "to {}", "maximum": "to {}",
    "lt": "below {}", "minLength": "characters: from {}", "maxLength": "to {}",
    "minItems": "at least {}", "maxItems": "at most {}", "maxProperties": "at most {} fields",
}  # fmt: skip


def _bounds(schema: dict[str, Any]) -> str:
    """The limits of a field's own values, and whether it has no effect."""
    inert = ["no effect"] if schema.get("x-effect") == "none" else []
    limits = [
        ", ".join(
            said.format(f"{own[name]:,}".removesuffix(".0")) for name, said in _BOUNDS.items() if name in own
        )
        for own in _choices(schema)
        if own.keys() & _BOUNDS.keys()
    ]
    return "; ".join([*inert, *limits])


def parts() -> dict[str, Callable[[], str]]:
    """The generated parts by name."""
    drafters, verifiers = entries()
    return {
        "drafters": lambda: methods(drafters),
        "verifiers": lambda: methods(verifiers),
        "options of drafters": lambda: options(drafters),
        "options of verifiers": lambda: options(verifiers),
        "options of sampling": lambda: fields(SamplingParams),
        "options of speculation": lambda: fields(Speculation),
        "options of a target": lambda: arguments(CausalTarget),
        "families": families,
        "formats": formats,
        "api": api,
        "commands": commands,
        "server": server,
        "types": types,
    }


def types() -> str:
    """Types of GGUF files that outpace's own functions read."""
    rows = []
    for name, number in TYPES.items():
        numbers, size = BLOCKS[number]
        given = "as they are" if numbers == 1 else "in 8 bits, by 32"
        rows.append((f"`{name}`", numbers, f"{8 * size / numbers:g}", given))
    return table(("type", "weights of a block", "bits of a weight", "rows are multiplied"), rows)


def renewed(text: str) -> str:
    """A page with its generated parts as they are now."""
    made = parts()
    return _PART.sub(lambda part: f"{part[1]}{made[part[2]]()}\n{part[3]}", text)


def main() -> None:
    for page in ALL:
        text = page.read_text("utf-8")
        if (now := renewed(text)) != text:
            page.write_text(now, "utf-8")
            print(page.relative_to(ROOT))
    for path, text in tables().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
