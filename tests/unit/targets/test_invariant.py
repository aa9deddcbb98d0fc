"""Bit-exact steps on a GPU: kernels that give a row the same bits among any rows, columns and chunks.

Without a GPU, Triton's interpreter runs them on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from devices import CUDA, INTERPRETER, TRITON_DEVICES, TRITON_MODELS
from models import tiny_llama
from outpace.core import SamplingParams, UnsupportedModel
from outpace.engine.engine import Engine
from outpace.targets import CausalTarget, Rows, Target
from outpace.targets.batch import Batch
from outpace.targets.cpu.linear import Linear
from outpace.targets.cpu.trials import row_step
from outpace.targets.gpu.graphs import Eager, Made
from outpace.targets.gpu.invariant import InvariantNorm, Triton, invariant_attention, invariant_norm
from outpace.targets.inputs.device_rows import in_order, read_numbers, row_numbers
from outpace.targets.step.bit_test import why_bits_differ
from parts import first, in_turn, one_in
from paths import random_tree
from replay import Replay

kernels = pytest.importorskip("outpace.targets.gpu.invariant_kernels", exc_type=ImportError)
interpreter = pytest.importorskip("triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def _products_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row of the interpreter's products not depend on its place, as a GPU's do not.

    NumPy's library may treat the last rows of a tile differently: OpenBLAS does with its kernels for Haswell.
    Torch's number of threads is nothing to the interpreter, so it is tried with one only.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr(interpreter, "np", _WithoutBlas())
        monkeypatch.setattr("outpace.targets.cpu.trials._TRIED_THREADS", ())


class _WithoutBlas:
    """NumPy with products by einsum, which sums each number by itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(left: Any, right: Any, dtype: Any = None) -> Any:
        return np.einsum("...ij,...jk->...ik", left, right, dtype=dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = (1, 2, 3, 5, 8, 17)  # rows, beside each of which others may be


def some(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(device, dtype)


# -- linear layers and norms ------------------------------------------------------------------------------


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs", "biased"), [(200, 40, True), (128, 32, False)])
def test_a_product_is_torchs_with_one_rows_bits(
    inputs: int, outputs: int, biased: bool, dtype: torch.dtype, device: str
) -> None:
    """Inputs and outputs that do not fill tiles, a bias, rows that are not adjacent; any neighbours."""
    rows = some(24, 2 * inputs, dtype=dtype, device=device)[:, :inputs]
    weight = some(outputs, inputs, 1, dtype=dtype, device=device)[..., 0]
    bias = some(outputs, dtype=dtype, device=device) if biased else None
    whole = kernels.linear(rows, weight, bias)
    wide = nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    assert whole.dtype == dtype
    assert (whole - wide).abs().max() <= 2 * wide.abs().max() * torch.finfo(dtype).eps
    for count in COUNTS:
        for start in (0, 7):
            found = kernels.linear(rows[start : start + count], weight, bias)
            assert torch.equal(found, whole[start : start + count]), count


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(("kind", "dtype"), in_turn([LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm], DTYPES))
def test_a_norm_is_the_models_with_one_rows_bits(kind: Any, dtype: torch.dtype, device: str) -> None:
    norm = kind(48, eps=1e-5).to(device, dtype)
    norm.weight.data += some(48, dtype=dtype, device=device) / 3
    found = invariant_norm(norm, dtype)
    assert isinstance(found, InvariantNorm)
    rows = some(2, 17, 48, dtype=dtype, device=device)
    with torch.inference_mode():
        whole, expected = found(rows), norm(rows)
        off = (whole.double() - expected.double()).abs().max()
        assert whole.dtype == dtype and off <= 4 * torch.finfo(dtype).eps * expected.abs().max()
        for count in COUNTS:
            assert torch.equal(found(rows[1, :count]), whole[1, :count])
        assert torch.equal(found(nn.functional.pad(rows, (1, 0))[..., 1:]), whole)  # not aligned


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_other_norms_stay_as_they_are(device: str) -> None:
    class CappedNorm(LlamaRMSNorm):
        def forward(self, states: Tensor) -> Tensor:
            return super().forward(states).clamp(max=1)

    for module in (nn.LayerNorm(16), nn.Linear(4, 4), CappedNorm(16)):
        assert invariant_norm(module.to(device), torch.float32) is None
    # Weights that promote the rows.
    assert invariant_norm(LlamaRMSNorm(16).to(device), torch.bfloat16) is None


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_tiles_that_depend_on_the_number_of_rows_are_found_out(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ByRows(Triton):
        def multiply(self, rows: Tensor, packed: Any, bias: Tensor | None) -> Tensor:
            monkeypatch.setattr(kernels, "_INPUTS", 128 if len(rows) > 1 else 16)
            return super().multiply(rows, packed, bias)

    place = torch.device(device)
    assert row_step(Triton(), torch.float32, 96, 40, place) == 1
    assert row_step(ByRows(), torch.float32, 96, 40, place) > 1


# -- attention ----------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "sliding": {"sliding": 70},
    "near": {"sliding": 3},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
}


class Text:
    """Queries, keys and values of a tree after a context, and attention to them in several forwards."""

    def __init__(
        self,
        context: int,
        dtype: torch.dtype,
        device: str,
        groups: int = 3,
        sliding: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        self.context, self.sliding, self.softcap = context, sliding, softcap
        self.parents, self.paths = random_tree(13, context)
        total = context + 13
        self.query = some(1, groups, total, 16, dtype=dtype, device=device)
        self.key, self.value = some(2, 1, 1, total, 24, dtype=dtype, device=device)
        self.key = self.key[..., :16]
        self.sinks = some(groups, dtype=dtype, device=device) if sinks else None

    def attend(self, rows: list[int], columns: list[int], feed: Rows, room: int = 0) -> Tensor:
        """Attention of a sequence that has these columns of the text, and feeds these rows: [width, ...]."""
        base, width = len(columns) - len(rows), len(rows)
        numbers = row_numbers([feed], [base], width, width + len(feed.fed))
        trees = read_numbers(torch.from_numpy(numbers).to(self.query.device), width).trees
        key, value = (
            nn.functional.pad(part[:, :, columns], (0, 0, 0, room), value=7.0)
            for part in (self.key, self.value)
        )
        mask = in_order(trees, self.sliding)[1]
        query = self.query[:, :, rows]
        module = nn.Identity()
        softcap = {} if self.softcap is None else {"softcap": self.softcap}
        return invariant_attention(module, query, key, value, mask, s_aux=self.sinks, **softcap)[0][0]

    def tree(self) -> Tensor:
        rows = [*range(self.context, self.context + 13)]
        return self.attend(rows, [*range(self.context), *rows], Rows([1] * 13, self.parents))

    def columns(self, node: int) -> list[int]:
        """The columns of a node's text, in its order."""
        return [*range(self.context), *(self.context + one for one in self.paths[node])]

    def alone(self, node: int, room: int = 0) -> Tensor:
        columns = self.columns(node)
        return self.attend(columns[-1:], columns, Rows([1]), room)[0]

    def chunk(self, node: int, width: int) -> Tensor:
        """The node at the end of a chunk of its text."""
        columns = self.columns(node)
        return self.attend(columns[-width:], columns, Rows([1] * width))[-1]

    def differing(self) -> int:
        """Number of nodes that do not have the bits of plain decoding in every forward."""
        tree, found = self.tree(), 0
        for node in (9, max(range(13), key=lambda one: len(self.paths[one]))):
            plain, width = self.alone(node), len(self.paths[node])
            others = [tree[node], self.alone(node, 90), self.chunk(node, width), self.chunk(node, width + 5)]
            found += not all(torch.equal(plain, other) for other in others)
        return found


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize(
    ("context", "dtype", "name"),
    [
        *one_in(2, [(61, torch.float32, name) for name in OPTIONS]),
        (5, torch.float32, "plain"),
        (88, torch.bfloat16, "plain"),
        (88, torch.float16, "sliding"),
    ],
)
def test_a_row_has_plain_decodings_bits(
    context: int, dtype: torch.dtype, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a tree, in chunks and in a wider cache; stretches are short, so there are two."""
    monkeypatch.setattr(kernels, "_SPLIT", 64)
    assert Text(context, dtype, device, **OPTIONS[name]).differing() == 0


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("groups", first(1, [20, 1]))
def test_a_row_has_plain_decodings_bits_in_blocks_of_many_rows_or_few(groups: int, device: str) -> None:
    assert Text(40, torch.float32, device, groups=groups).differing() == 0


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_rows_fed_later_in_a_tree_have_the_same_bits(device: str) -> None:
    text = Text(61, torch.float32, device)
    rows = [*range(61, 74)]
    later = Rows([1] * 5, text.parents[8:], fed=text.parents[:8])
    found = text.attend(rows[8:], [*range(61), *rows], later)
    assert torch.equal(found, text.tree()[8:])


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_a_split_that_depends_on_the_number_of_rows_is_found_out(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = kernels.attend

    def by_rows(query: Tensor, *more: Any) -> Tensor:
        monkeypatch.setattr(kernels, "_SPLIT", 64 if query.shape[2] == 1 else 32)
        return attend(query, *more)

    monkeypatch.setattr(kernels, "attend", by_rows)
    assert Text(88, torch.float32, device).differing()


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_columns_in_the_order_of_the_cache_are_found_out(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a row differ if its columns are summed in another order than that of its text."""
    text, encode = Text(61, torch.float32, device), in_order

    def reordered(trees: Any, sliding: int | None) -> tuple[Tensor, Tensor]:
        full, near = encode(trees, sliding)
        count = full[0, 0, 9, 3] - full[0, 0, 9, 1]
        full[0, 0, 9, 4 : 4 + count] = full[0, 0, 9, 4 : 4 + count].flip(0)
        return full, near

    node, right = 9, text.tree()
    monkeypatch.setattr(__name__ + ".in_order", reordered)
    assert torch.allclose(text.tree()[node], right[node], atol=1e-5)
    assert not torch.equal(text.tree()[node], right[node])


def test_attention_refuses_what_it_does_not_compute() -> None:
    part = torch.zeros(1, 1, 1, 16)
    with pytest.raises(UnsupportedModel, match="a bias"):
        invariant_attention(nn.Identity(), part, part, part, None, position_bias=part)
    with pytest.raises(UnsupportedModel, match="its own masks"):
        invariant_attention(nn.Identity(), part, part, part, None)


# -- targets ------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_a_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, a CPU is treated as one."""
    if "device" not in request.fixturenames or request.getfixturevalue("device") == "cpu":
        for module in ("config", "refusals"):
            monkeypatch.setattr(f"outpace.targets.inputs.{module}.GPU", "cpu")


SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@cache
def llama(device: str, dtype: torch.dtype, layers: int = 1) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SHAPE, "num_hidden_layers": layers})).to(device, dtype).eval()


UNTESTED: dict[str, Any] = {"plan": "invariant", "check": False}


def exact(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> CausalTarget:
    """A target that has not been tested yet."""
    return CausalTarget(llama(device, dtype), exact=True, **{**UNTESTED, **options})


@pytest.mark.parametrize("device", TRITON_MODELS)
def test_a_target_passes_the_bit_test(device: str) -> None:
    """And the self-test: its logits are the model's own, but for rounding."""
    target = CausalTarget(llama(device, torch.float32, 2), exact=True, plan="invariant")
    assert target.bit_exact and not target.why_inexact
    layers = list(target._modules.step.modules())
    assert sum(isinstance(one, Linear) for one in layers) == 2 * 7 + 1
    assert sum(isinstance(one, InvariantNorm) for one in layers) == 2 * 2 + 1
    assert not any(isinstance(one, Linear | InvariantNorm) for one in target.model.modules())


@pytest.mark.parametrize("device", TRITON_MODELS)
def test_a_split_by_rows_fails_the_bit_test(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = kernels.linear

    def by_rows(rows: Tensor, *more: Any) -> Tensor:
        monkeypatch.setattr(kernels, "_INPUTS", 16 if len(rows) == 1 else 128)
        return linear(rows, *more)

    target = exact(device)
    monkeypatch.setattr(kernels, "linear", by_rows)
    assert "(Linear) gives a row other bits" in why_bits_differ(target, target._modules.step, 64)


PROMPTS = [[*range(7, 16)], [50, 51]]


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_logits_have_the_same_bits_in_a_tree_and_alone(dtype: torch.dtype, device: str) -> None:
    target = exact(device, dtype)
    parents, paths = random_tree(7, 4)
    cache = target.new_cache(2, 256)
    slots = [cache.allocate(), cache.allocate()]
    for slot, prompt in zip(slots, PROMPTS, strict=True):
        target.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(len(prompt))})
    feeds = {slots[0]: Rows([*range(20, 27)], parents), slots[1]: Rows([9, 9])}
    together = target.forward(cache, Batch.of(feeds)).logits_of(slots[0]).clone()
    cache.keep({})
    for node in max(paths, key=len):
        alone = target.forward(cache, Batch.of({slots[0]: [20 + node]})).logits_of(slots[0])
        cache.keep({slots[0]: [0]})
        assert torch.equal(alone[0], together[node])


def tokens_of(target: CausalTarget, drafter: str, new: int = 8, **options: Any) -> list[list[int]]:
    params = [SamplingParams(max_new_tokens=new, temperature=t, seed=3, ignore_eos=True) for t in (0, 1)]
    engine = Engine(target, drafter, adaptive=False, slots=2, length=64, **options)
    return [one.tokens for one in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("device", TRITON_MODELS)
def test_drafts_do_not_change_a_token_in_bfloat16(device: str) -> None:
    target = exact(device, torch.bfloat16)
    drafted = tokens_of(target, "lookahead:window=3,ngram=3,guesses=2", prefill_chunk=5)
    assert drafted == tokens_of(target, "none")


@pytest.mark.parametrize("device", [INTERPRETER])
def test_fixed_shapes_are_replayed_with_the_same_tokens(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each is a graph. What replays them here sees operations of torch, which the kernels become."""
    for name in ("linear", "norm", "attend"):
        monkeypatch.setattr(kernels, name, operation(name, getattr(kernels, name)))
    runner = Replay()
    target = exact(device, static=True, runner=runner)
    assert target.bit_exact
    drafted = tokens_of(target, "lookahead:window=2,ngram=3,guesses=1", new=4)
    assert runner.replays > runner.captures > 1
    assert drafted == tokens_of(exact(device), "none", new=4)


class Off(Eager):
    """A runner whose forwards of one row give other logits."""

    def capture(self, forward: Callable[[], Made]) -> Callable[[], Made]:
        def run() -> Made:
            made = forward()
            return made._replace(logits=made.logits + 1e-3) if made.logits.shape[1] == 1 else made

        return run


@pytest.mark.parametrize("device", TRITON_MODELS)
def test_fixed_shapes_are_tested_too(device: str) -> None:
    model = tiny_llama(dtype=torch.float32, layers=1).to(device)
    options: dict[str, Any] = {"exact": True, "plan": "invariant", "static": True}
    assert CausalTarget(model, runner=Eager(), **options).bit_exact
    with pytest.raises(UnsupportedModel, match="is not bit-exact"):
        CausalTarget(model, runner=Off(), **options)


def operation(name: str, function: Any) -> Any:
    return torch.library.custom_op(f"outpace_tests::{name}", function, mutates_args=())


@pytest.mark.parametrize("device", [CUDA])
def test_a_graph_gives_the_same_tokens(device: str) -> None:
    target = exact(device, torch.bfloat16, static=True, check=True)
    drafted = tokens_of(target, "lookahead:window=3,ngram=3,guesses=2")
    assert drafted == tokens_of(target, "none") == tokens_of(exact(device, torch.bfloat16), "none")


@pytest.mark.parametrize("device", TRITON_MODELS)
def test_soft_caps_windows_and_other_norms(device: str) -> None:
    options = {"sliding_window": 12, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0}
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**{**SHAPE, "num_hidden_layers": 2}, **options))
    assert CausalTarget(model.to(device).eval(), exact=True, plan="invariant").bit_exact


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_what_cannot_be_exact_on_a_gpu_is_refused_with_the_reason(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(dtype=torch.bfloat16).to(device)
    assert "not measured" in CausalTarget(model, check=False).why_inexact

    class OtherNorm(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return states / states.norm(dim=-1, keepdim=True)

    model.model.norm = OtherNorm()
    with pytest.raises(UnsupportedModel, match=r"model\.norm \(OtherNorm\) sums as torch does"):
        CausalTarget(model, exact=True, **UNTESTED)
    monkeypatch.setattr("outpace.targets.inputs.refusals.why_no_triton", lambda: "pip install triton")
    with pytest.raises(UnsupportedModel, match="pip install triton"):
        Target(model, exact=True, **UNTESTED)
