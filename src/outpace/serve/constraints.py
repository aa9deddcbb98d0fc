"""Constraints of a text under the names of OpenAI, vLLM and llama-server, as a schema or a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError, from_json

from outpace.grammars.notations import Free, written
from outpace.serve.errors import Refused
from outpace.serve.fields import INERT, PARTS, Object, Wire, check_size
from outpace.serve.schemas import Lark

Constraint = dict[str, Any] | Lark | Free


def _parsed_schema(given: Any) -> Any:
    """A schema that may be sent as its JSON."""
    if not isinstance(given, str):
        return given
    try:
        found = from_json(given, allow_inf_nan=False)
    except ValueError as error:
        raise PydanticCustomError("no_json", "not JSON: {error}", {"error": str(error)}) from None
    if not isinstance(found, dict):
        raise PydanticCustomError("no_object", "a schema is a JSON object")
    check_size(found)
    return found


class JsonSchema(Wire):
    name: Annotated[str | None, INERT] = None
    description: Annotated[str | None, INERT] = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, INERT] = None


class Format(Wire):
    """A ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None  # as llama-server has it


Pattern = Annotated[str, StringConstraints(min_length=1)]
Choices = Annotated[list[Pattern], Field(min_length=1, max_length=PARTS, fail_fast=True)]
SchemaOrText = Annotated[Object | str, AfterValidator(_parsed_schema)]


class StructuredOutputsParams(Wire):
    """A constraint of the text, as vLLM has it."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool = False
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    disable_any_whitespace: Annotated[bool | None, INERT] = None
    disable_fallback: Annotated[bool | None, INERT] = None


class Constrained(Wire):
    """Constraints of the text, of which a request has one, as OpenAI, vLLM and llama-server have them."""

    response_format: Format | None = None
    structured_outputs: StructuredOutputsParams | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    json_schema: Object | None = None
    grammar: Pattern | None = None


def constraint_of(
    body: Constrained, min_tokens: int, called: Lark | None = None
) -> tuple[Constraint | None, str]:
    """The constraint of a request, None if it has none, and the name of its field.

    Args:
        called: the grammar of a tool that must be called.

    Raises:
        Refused: there are two constraints, or they do not go with other fields, or a schema is missing.
    """
    formats = _formats(body) if called is None else {}  # of texts: a call has none
    given = {**formats, **_vllms(body), **_older(body), **_llama_servers(body)}
    names, found = list(given), list[Constraint](given.values())
    if called is not None:
        names.append("a required tool")
        found.append(called)
    if len(names) > 1:
        raise Refused(400, f"{' and '.join(names)} exclude each other; give one", names[0].partition(".")[0])
    if not names:
        return None, ""
    if min_tokens:
        raise Refused(400, f"min_tokens cannot be combined with {names[0]}; leave it out", "min_tokens")
    return found[0], "tools" if called is not None else names[0].partition(".")[0]


def _formats(body: Constrained) -> dict[str, Constraint]:
    form = body.response_format
    return {} if form is None or form.type == "text" else {"response_format": _schema_of(form)}


def _schema_of(form: Format) -> dict[str, Any]:
    if form.type == "json_object":
        return form.schema_ if form.schema_ is not None else {"type": "object"}
    own = form.json_schema
    if own is None and form.schema_ is None:
        raise Refused(400, "response_format needs json_schema: {name, schema}", "response_format")
    found = form.schema_ if own is None else own.schema_
    return {} if found is None else found


def _vllms(body: Constrained) -> dict[str, Constraint]:
    asked = body.structured_outputs
    if asked is None:
        return {}
    found = _named(json=asked.json_, regex=asked.regex, choice=asked.choice, grammar=asked.grammar)
    if asked.json_object:
        found["json_object"] = {"type": "object"}
    if not found:
        raise Refused(
            400, "structured_outputs needs json, json_object, regex, choice or grammar", "structured_outputs"
        )
    return {f"structured_outputs.{name}": one for name, one in found.items()}


def _older(body: Constrained) -> dict[str, Constraint]:
    found = _named(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    return {f"guided_{name}": one for name, one in found.items()}


def _llama_servers(body: Constrained) -> dict[str, Constraint]:
    found: dict[str, Constraint] = {} if body.json_schema is None else {"json_schema": body.json_schema}
    return found if body.grammar is None else {**found, "grammar": Free("gbnf", body.grammar)}


def _named(**given: Any) -> dict[str, Constraint]:
    return {kind: written(kind, one) for kind, one in given.items() if one is not None}
