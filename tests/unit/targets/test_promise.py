"""The promise of a target, repeated by its results; steps on a model's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outpace
from loose import Loose
from models import tiny_llama
from outpace.core import PROMISES, OutpaceError, Promise, SamplingParams, UnsupportedModel
from outpace.drafters import load_drafter
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Target, TargetModel
from outpace.targets.around import WrappedTarget
from outpace.targets.plan import StepPlan
from outpace.testing import ToyTarget
from outpace.verify import Verifier

OFF: dict[str, Any] = {"plan": "stock"}
HALF = torch.bfloat16
TIES = "same tokens but for near-ties"


def off(dtype: torch.dtype, **more: Any) -> CausalTarget:
    return CausalTarget(tiny_llama(dtype=dtype, heads=8), **OFF, **more)


class File(ToyTarget):
    """A target like that of a GGUF file, whose logits are float32."""

    dtype = torch.float32  # type: ignore[assignment]

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @property
    def file_type(self) -> str:
        return self.kind


class Around(WrappedTarget):
    """The description of an inner target, and no more."""

    def __init__(self, inner: TargetModel) -> None:
        self.wrap(inner)

    new_cache = forward = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "promise"),
    [
        (torch.float64, "same tokens"),
        (torch.float32, TIES),
        (torch.bfloat16, "not exact"),
        (torch.float16, "not exact"),
    ],
)
def test_what_is_not_bit_exact_promises_by_its_dtype(dtype: torch.dtype, promise: Promise) -> None:
    target = off(dtype)
    assert target.promise == promise and target.why_inexact
    assert Around(target).promise == promise and Around(Around(target)).promise == promise
    target.plan = StepPlan(exact=True, why_inexact=None)
    assert target.promise == "same bits" == Around(target).promise


@pytest.mark.parametrize(
    ("kind", "promise"), [("F32", TIES), ("Q4_K - Medium", "not exact"), ("BF16", "not exact")]
)
def test_a_file_promises_by_its_type(kind: str, promise: Promise) -> None:
    assert File(kind).promise == promise == Around(File(kind)).promise


def test_rounded_weights_are_no_float32() -> None:
    target = off(torch.float32)
    target.quantised = "int8"
    assert target.promise == "not exact" == Around(target).promise
    assert PROMISES[0] == "same bits" and PROMISES[-1] == "not exact"


def test_every_generation_repeats_it() -> None:
    target, params = off(HALF), SamplingParams(max_new_tokens=4)
    sampled = SamplingParams(max_new_tokens=4, temperature=1.0)

    def told(
        params: SamplingParams, verifier: str | Verifier = "match", of: TargetModel = target
    ) -> tuple[Any, Any]:
        (found,) = Engine(of, "prompt_lookup", verifier).generate([[1, 2, 1, 2]], params)
        return found.stats.promise, found.stats.why_inexact

    assert {told(params), told(sampled), told(params, "rejection")} == {
        ("not exact", "plan='stock' is not bit-exact")
    }
    assert told(sampled, "rejection") == told(params, Loose()) == told(sampled, Loose()) == (None, None)
    assert told(params, of=off(torch.float32)) == (TIES, "plan='stock' is not bit-exact")
    exact = Target(tiny_llama(dtype=HALF, heads=8), exact=True)
    assert told(params, of=exact) == ("same bits", None)


@pytest.mark.parametrize("drafter", ["prompt_lookup", load_drafter("prompt_lookup")])
def test_accelerate_warns_where_drafts_may_change_tokens(drafter: Any) -> None:
    model = tiny_llama(dtype=HALF, heads=8)
    with pytest.warns(UserWarning, match="not exact here.*exact is off.*docs/concepts/exactness.md"):
        outpace.accelerate(model, drafter, exact=False)
    with pytest.warns(UserWarning, match="lossy"):
        outpace.accelerate(model, drafter, "loose:Loose", exact=False)
    outpace.accelerate(model, "none", stock=True)  # pytest makes an error of a warning of ours
    outpace.accelerate(model, load_drafter("none"), exact=False)
    outpace.accelerate(tiny_llama(dtype=torch.float32), drafter, exact=False)
    with pytest.warns(UserWarning, match="not exact here.*own modules"):
        outpace.accelerate(model, drafter, stock=True)


# -- the model's own modules -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [7, 100, 700])
def test_plain_decoding_on_stock_modules_has_the_bits_of_generate(dtype: torch.dtype, length: int) -> None:
    """A prompt of 700 tokens would otherwise be read in chunks, and the last token alone."""
    model = tiny_llama(context=1024, dtype=dtype, heads=16)
    prompt = torch.randint(1, 97, (1, length), generator=torch.Generator().manual_seed(length))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(prompt, **options)
    outpace.accelerate(model, "none", stock=True)
    found = model.generate(prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.equal, found.logits, expected.logits))


def test_stock_steps_are_the_models_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(dtype=HALF, heads=8)
    # Whatever kernel would be the fastest here.
    monkeypatch.setattr(
        "outpace.targets.step.plans.why_not_packed", lambda _, pack, exact: "off" if pack is False else None
    )
    target = CausalTarget(model, stock=True)
    assert target._modules.step is model and not target.plan.packed and not target.plan.native
    assert target.stock and Around(target).stock
    assert "own modules" in target.why_inexact
    assert Engine(target, prefill_chunk=7).prefill_chunk == 7 and Engine(off(HALF)).prefill_chunk == 512
    assert Engine(target).prefill_chunk > 10**6


@pytest.mark.parametrize(
    "options",
    [
        {"exact": True},
        {"plan": "native"},
        {"quantise": "int8"},
        {"static": True},
    ],
)
def test_options_that_change_the_modules_are_refused_beside_it(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(OutpaceError, match=f"leave {name} or stock out"):
        Target(tiny_llama(dtype=HALF, heads=8), stock=True, **options)


def test_models_that_run_on_other_modules_refuse_it() -> None:
    model = tiny_llama(dtype=HALF)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedModel, match="attn_implementation='sdpa', or leave stock out"):
        Target(model, stock=True)
    with pytest.raises(OutpaceError, match=r"llama\.cpp runs it"):
        outpace.load("some.gguf", stock=True, backend="llamacpp")
