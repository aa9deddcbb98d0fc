"""The laboratory's documents, and what outpace's say of it, by the tests of ``tests/test_documents.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import test_documents as own
from outpace.core import OutpaceError
from outpace.spec import load
from outpace_lab.train.methods import LEARNED

LAB = own.ROOT / "lab" / "docs"
FILES = sorted(LAB.rglob("*.md"))
NAMES = [own.test_commands_and_their_options_are_there, own.test_options_named_in_the_text_are_there]
OTHERS = [
    own.test_files_and_scripts_named_in_code_are_there,
    own.test_links_lead_to_files_and_headings,
    own.test_code_can_be_parsed,
    own.test_names_that_code_imports_are_there,
    own.test_no_document_promises_more_than_the_page,
]


@pytest.mark.parametrize("file", [*own.FILES, *FILES], ids=own.name_of)
@pytest.mark.parametrize("check", NAMES)
def test_commands_and_options_are_there(check: Callable[[Path], None], file: Path) -> None:
    check(file)


@pytest.mark.parametrize("file", FILES, ids=own.name_of)
@pytest.mark.parametrize("check", OTHERS)
def test_a_page(check: Callable[[Path], None], file: Path) -> None:
    check(file)


@pytest.mark.parametrize("file", FILES, ids=own.name_of)
def test_specs_are_of_methods_as_they_are(file: Path) -> None:
    methods = {name: cls.config_type for name, cls in LEARNED.items()}
    for spec in own.specs(file.read_text("utf-8")):
        try:
            own.load_method(spec)
        except OutpaceError:
            if spec.partition(":")[0] not in methods:  # otherwise it may be what is to be trained
                raise
            load("method", methods, spec)


def test_a_mistake_is_seen() -> None:
    own.test_a_mistake_is_seen("outpace bench compare a b --suite gsm8k")


def test_every_page_is_reached_from_the_index() -> None:
    own.test_every_page_is_reached_from_the_index(LAB)
