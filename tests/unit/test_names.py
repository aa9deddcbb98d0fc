"""Names are checked before torch is imported, with a hint where one is misspelt."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from outpace.catalogue import Outline, described, entries, outlines
from outpace.core import EXTRAS, OutpaceError, missing, need
from outpace.drafters import DRAFTERS
from outpace.names import check_device, check_names, check_suite
from outpace.spec import _needed, hints_of
from outpace.verify import VERIFIERS
from without_torch import check_answers, check_mistakes

# What a user types, and what is said.
MISTAKES = {
    "generate -p x --drafter sufix": "Did you mean 'suffix'?",
    "generate -p x --drafter suffix:memry=0": "Did you mean 'memory'?",
    "generate -p x --drafter suffix:memory=all": "memory must be a whole number, not 'all'",
    "generate -p x --drafter combined:(lookahead:windw=3)+(suffix)": "Did you mean 'window'?",
    "generate -p x --drafter lookahead:refill=drawn": "refill must be 'draw' or 'argmax'",
    "generate -p x --drafter (suffix": "parentheses do not match",
    'generate -p x --drafter {"method":"combined","parts":["sufix"]}': "Did you mean 'suffix'?",
    'bench --drafters none,{"method":"suffix","memry":0,"branches":2}': "Did you mean 'memory'?",
    "generate -p x --drafter draft_model:model=smolm2": "Did you mean 'smollm2'?",
    "generate -p x --drafter combined:(eagle:path=./no/drafter)+(suffix)": "there is no folder ./no/drafter",
    "pull smolm2": "Did you mean 'smollm2'?",
    "generate -p x --verifier matsh": "Did you mean 'match'?",
    "generate -p x --dtype bfloat": "Did you mean 'bfloat16'?",
    "generate -p x --model smolm2": "Did you mean 'smollm2'?",
    "generate -p x --model ./no/such/folder": "no such folder",
    "generate -p x --model model.gguf": "no such file: model.gguf",
    "chat --device cdua:1": "Did you mean 'cuda'?",
    "serve --drafter sufix": "Did you mean 'suffix'?",
    "serve --also a=sufix": "Did you mean 'suffix'?",
    "serve --otlp-endpoint http://x": "needs opentelemetry.sdk, which is not installed",
    "demo --drafter lokahead": "Did you mean 'lookahead'?",
    "bench --suite file:no.jsonl": "no such file: no.jsonl",
    "bench --suite bultin": "Did you mean 'builtin'?",
    "bench --drafters none,sufix": "Did you mean 'suffix'?",
    "bench --peers transfomers:plain": "Did you mean 'transformers'?",
    "bench --peers transformers:plian": "Did you mean 'plain'?",
    "bench --quantise int3": "quantise must be int8 or int4, not 'int3'. Did you mean 'int8'?",
    "bench --batch two": "--batch takes numbers",
    "generate -p x --quantise int3": "Did you mean 'int8'?",
    "chat --quantise int3": "Did you mean 'int8'?",
    "serve --quantise int3": "Did you mean 'int8'?",
    "generate -p x --device-map atuo": "Did you mean 'auto'?",
    "bench --device-map atuo": "Did you mean 'auto'?",
    "serve --device-map atuo": "Did you mean 'auto'?",
    "generate -p x --llamacpp threads=4": "--llamacpp is for .gguf files",
    "serve --llamacpp threads=4": "--llamacpp is for .gguf files",
    "drafters sufix": "Did you mean 'suffix'?",
    "serve --api-keys no-such-file": "cannot read the keys in no-such-file",
}


def test_mistakes_are_found_without_torch() -> None:
    check_mistakes(MISTAKES)


def test_answers_that_need_no_torch() -> None:
    check_answers(
        {
            "drafters": "the usual choice",
            "drafters suffix --json": '"num_speculative_tokens"',
            "models": "smollm2",
        }
    )


@pytest.mark.parametrize(("kind", "classes"), [("drafter", DRAFTERS), ("verifier", VERIFIERS)])
def test_the_table_is_that_of_the_classes(kind: str, classes: dict[str, type[Any]]) -> None:
    written = {name: described(name, cls) for name, cls in classes.items()}
    assert entries(kind) == written, "run: python tools/reference.py"
    found = outlines(kind)
    for name, cls in classes.items():
        drawn, own = hints_of(found[name]), hints_of(cls)
        assert list(drawn) == list(own) and _needed(found[name]) == _needed(cls)
        for option, hint in own.items():
            known = drawn[option] in (hint, Any) or Outline in getattr(drawn[option], "__args__", ())
            assert known, f"{name}:{option} is {hint}, and not {drawn[option]}"


def test_what_torch_or_another_package_may_know_is_left_to_it() -> None:
    check_names(drafter="their_package.drafting:Mine:anything=3", device="privatedevice:3")
    check_names(drafter="combined:(their_package.drafting:Mine)+(suffix)")
    for device in ("cpu", "mps", "xpu", "npu:0"):
        check_device(device)
    check_suite(f"file:{__file__}")
    with pytest.raises(OutpaceError, match="there is no suite 'gsm8k_of_nobody'"):
        check_suite("gsm8k_of_nobody")


@pytest.mark.parametrize(("built", "told"), [("2.13.0+cpu", "built for CPUs alone"), ("2.13.0", "")])
def test_a_gpu_is_refused_if_torch_has_none(monkeypatch: pytest.MonkeyPatch, built: str, told: str) -> None:
    monkeypatch.setattr("outpace.names.version", lambda package: built)
    with pytest.raises(OutpaceError, match=told) if told else nullcontext():
        check_device("cuda:1")


def test_extras_are_those_of_the_package() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8")
    section = pyproject.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    declared = re.findall(r"^(\w+) = ", section, re.MULTILINE)
    assert set(declared) == {*EXTRAS, "test", "dev", "docs"}
    for extra, modules in EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
        packages = [name for name in re.findall(r'"([\w-]+)', listed) if name != "outpace"]
        assert len(packages) == len(modules), extra


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.core.extras.EXTRAS", {"one": ("json", "no_such.thing")})
    assert missing("one") == ["no_such.thing"]
    with pytest.raises(OutpaceError, match=r"it needs no_such.thing, .*pip install .*\[one\]"):
        need("one", "it")
