"""The self-test: rounding that it must pass, and mistakes that it must not, over families and dtypes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outpace import Target
from outpace.core import UnsupportedModel
from outpace.targets.cpu import exact_attention
from outpace.targets.inputs import forward, masks
from outpace.targets.native.fitting import why_not_native
from outpace.targets.native.weights import Weights
from outpace.targets.step.agreement import difference
from outpace.targets.step.reference import Imprecise
from outpace.targets.step.replay import Replay, layers_of
from outpace.targets.step.self_test import self_test
from outpace.targets.step.tame import SLIDING, tame
from parts import first
from zoo.families import FAMILIES
from zoo.family import randomise
from zoo.seq2seq_families import SEQ2SEQ_FAMILIES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMS = [0.25, 1.0, 4.0, 8.0]
# Row and column in a tree of seven rows, and what its mask then has there.
BITS = {"cousin": ((5, 1), True), "parent": ((6, 4), False), "prompt": ((3, -2), False)}
ERRING = ["window+", "window-", "scale"]
MISTAKES = [*BITS, "position", *ERRING]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def scaled(model: Any, scale: float) -> Any:
    """Multiply the weights of a model's norms; Gemma's add 1 to theirs."""
    with torch.no_grad():
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if "Norm" in type(module).__name__ and weight is not None:
                one = float(type(module).__name__.startswith("Gemma"))
                weight.copy_((weight + one) * scale - one)
    return model


def built(name: str, dtype: torch.dtype, scale: float = 1.0) -> Any:
    return scaled(FAMILIES[name].build(torch.float32), scale).to(dtype)


def erring(model: Any, mistake: str) -> Any:
    """The model, of a class that errs where it gets a mask and a cache, as a target's steps give it."""
    kind = type(model)

    class Erring(kind):  # type: ignore[valid-type, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("use_cache") is False:
                return super().forward(*args, **kwargs)
            mask = kwargs.get("attention_mask")
            near = mask.get("sliding_attention") if isinstance(mask, dict) else mask
            if mistake.startswith("window") and near is not None:
                shift_window(near, mistake == "window+")
            with other_scale(self) if mistake == "scale" else nullcontext():
                return super().forward(*args, **kwargs)

    Erring.forward.__signature__ = signature(kind.forward)  # type: ignore[attr-defined]
    Erring.__module__ = kind.__module__
    model.__class__ = Erring
    return model


@contextmanager
def planted(mistake: str) -> Iterator[None]:
    """A wrong bit in the masks of trees of seven rows, or a position of theirs that is shifted."""
    with pytest.MonkeyPatch.context() as patch:
        made, placed = masks.tree_masks, forward.positions_of

        def wrong_masks(rows: Any, window: Any, *given: Any) -> Any:
            full, near = made(rows, window, *given)
            (row, column), seen = BITS[mistake]
            for place, (own, offset) in enumerate(zip(rows, window.offsets, strict=True)):
                if own.parents is not None and len(own.tokens) == 7:
                    for mask in (full, near):
                        mask[place, 0, row, offset + column] = seen
            return full, near

        def wrong_positions(row: Any, *given: int) -> Any:
            positions = placed(row, *given)
            if row.parents is not None and len(row.tokens) == 7:
                positions[5] += 1
            return positions

        if mistake in BITS:
            patch.setattr(masks, "tree_masks", wrong_masks)
        if mistake == "position":
            patch.setattr(forward, "positions_of", wrong_positions)
        yield


@contextmanager
def other_scale(model: Any) -> Iterator[None]:
    found = [module for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
    assert found
    before = [module.scaling for module in found]
    for module in found:
        module.scaling *= 1.1
    try:
        yield
    finally:
        for module, scaling in zip(found, before, strict=True):
            module.scaling = scaling


def shift_window(mask: Tensor, wider: bool) -> None:
    """Let rows whose window has left the text's start see one column more or less, in place."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    first = seen.long().argmax(dim=-1, keepdim=True)
    column = torch.arange(mask.shape[-1])
    at = (column == first - int(wider)) & (first > 0)
    on: Any = True if mask.dtype == torch.bool else 0.0
    off: Any = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    mask[at] = on if wider else off


def judge(name: str, dtype: torch.dtype, scale: float, mistake: str = "", **options: Any) -> bool:
    """True if the self-test accepts a family's model."""
    model = built(name, dtype, scale)
    try:
        with planted(mistake):
            # Apart from the search for an option under which a refused model loads.
            target: Any = Target(
                erring(model, mistake) if mistake in ERRING else model, check=False, **options
            )
            self_test(target, target.reference())
    except UnsupportedModel:
        return False
    return True


def applies(name: str, mistake: str) -> bool:
    return FAMILIES[name].sliding or not mistake.startswith("window")


SOME = [
    ("llama", torch.bfloat16, 0.25),
    ("gemma3", torch.float32, 8.0),
    ("gpt2", torch.bfloat16, 8.0),
    ("gpt-oss", torch.float16, 4.0),
]


@pytest.mark.parametrize(("name", "dtype", "scale"), SOME)
def test_rounding_passes_and_mistakes_do_not(name: str, dtype: torch.dtype, scale: float) -> None:
    assert judge(name, dtype, scale, exact=False)
    missed = [one for one in MISTAKES if applies(name, one) and judge(name, dtype, scale, one, exact=False)]
    assert not missed


@pytest.mark.slow
@pytest.mark.parametrize("scale", NORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_over_all(name: str, dtype: torch.dtype, scale: float) -> None:
    assert judge(name, dtype, scale)
    test_rounding_passes_and_mistakes_do_not(name, dtype, scale)


def deep(scale: float) -> Any:
    """24 layers of Gemma 3 whose rounding in bfloat16 grows to the size of the logits."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return scaled(transformers.AutoModelForCausalLM.from_config(config).eval(), scale)


@pytest.mark.parametrize("exact", [pytest.param("auto", marks=pytest.mark.slow), False])
def test_rounding_of_the_size_of_the_logits_passes(exact: Any) -> None:
    single = deep(4.0)
    model = copy.deepcopy(single).to(torch.bfloat16)
    text = torch.arange(1, 20)[None]
    with torch.inference_mode():
        logits = [one(input_ids=text).logits[0].double() for one in (single, model)]
    assert difference(*logits) > 0.25
    assert Target(model, check=True, exact=exact).bit_exact == (exact == "auto")


def test_a_wide_window_is_tested_too() -> None:
    """A window of more tokens than the test's texts have."""
    model = deep(1.0).to(torch.bfloat16)
    assert model.config.sliding_window > 100
    target: Any = Target(erring(model, "window-"), check=False)
    with pytest.raises(UnsupportedModel, match=f"sliding window is not the {SLIDING} tokens"):
        self_test(target, target.reference())


def test_the_cause_is_named() -> None:
    for mistake, cause in (
        ("scale", "of a chain too"),
        ("position", "does not honour a 4-D mask or positions"),
    ):
        with planted(mistake), pytest.raises(UnsupportedModel, match=cause):
            model = built("gpt2", torch.float32)
            Target(erring(model, mistake) if mistake in ERRING else model, check=True)


def wide_llama(dtype: torch.dtype, scale: float) -> Any:
    """A model that is fused."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomise(model, 0)
    return scaled(model, scale).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 0.25),
        (torch.bfloat16, 8.0),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((torch.float32, 8.0), (torch.bfloat16, 0.25))
        ),
    ],
)
def test_a_wrong_scale_in_compiled_layers(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention with sharper scores than the model's; the error names what loads."""
    if why := why_not_native(wide_llama(dtype, scale)):
        pytest.skip(why)
    Target(wide_llama(dtype, scale), check=True, plan="native")
    right = Weights.layer

    def wrong(*args: Any) -> Any:
        layer = right(*args)
        layer.scale *= 1.1
        return layer

    monkeypatch.setattr(Weights, "layer", wrong)
    with pytest.raises(Imprecise, match=r"layer 0.*rounding.*it loads with .*plan='\w+'$"):
        Target(wide_llama(dtype, scale), check=True, plan="native")


@pytest.mark.parametrize("dtype", first(1, [torch.bfloat16, torch.float16]))
def test_a_wrong_scale_in_exact_attention(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.scaled_dot_product_attention
    inner = exact_attention.exact_attention

    def wrong(*args: Any, **kwargs: Any) -> Any:
        kwargs["scaling"] = 1.1 * kwargs["scaling"]
        return inner(*args, **kwargs)

    model = wide_llama(dtype, 1.0)
    options: Any = {"plan": "exact"}
    Target(model, check=True, **options)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, exact_attention.EXACT, wrong)
    with pytest.raises(Imprecise, match=r"it loads with plan='\w+'$"):
        Target(model, check=True, **options)
    assert torch.nn.functional.scaled_dot_product_attention is right


def test_an_overflow_is_called_one() -> None:
    """Logits of a model's own that are not finite in its dtype are no matter of rounding."""
    model = built("gpt2", torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 3e4
    with pytest.raises(UnsupportedModel, match=r"overflows in float16.*it loads with dtype=torch.float32$"):
        Target(model.to(torch.float16), check=True)


# A module that has the setting ``fp32_precision``, and a value.
PRECISIONS = [
    (torch.backends, "tf32"),
    (torch.backends.cuda.matmul, "tf32"),
    (torch.backends.mkldnn, "bf16"),
    (getattr(torch.backends.mkldnn, "matmul", None), "bf16"),
]


@pytest.mark.parametrize(("owner", "value"), PRECISIONS, ids=["all", "cuda", "mkldnn", "mkldnn.matmul"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_new_settings_of_precision(name: str, owner: Any, value: str) -> None:
    """Products that the processor rounds are rounding, and mistakes are still found."""
    try:
        before = owner.fp32_precision
    except (AttributeError, AssertionError):
        pytest.skip("this torch has no such setting")
    try:
        owner.fp32_precision = value
        assert judge(name, torch.float32, 1.0)
        assert not judge(name, torch.float32, 1.0, "position")
    finally:
        owner.fp32_precision = before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("t5", "bart") else pytest.mark.slow)
        for name in SEQ2SEQ_FAMILIES
    ],
)
def test_encoder_decoder_models(name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        Target(SEQ2SEQ_FAMILIES[name].build(dtype), check=True)
    for mistake in ("parent", "position"):
        with planted(mistake), pytest.raises(UnsupportedModel, match="tree of tokens"):
            target: Any = Target(SEQ2SEQ_FAMILIES[name].build(torch.bfloat16), check=False)
            self_test(target, target.reference())


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_on_their_own_inputs_give_the_models_logits(name: str) -> None:
    """A replay of what a model's layers had anyway is its forward; no family's layers are missed."""
    model = FAMILIES[name].build(torch.float32)
    layers, ids = layers_of(model), torch.tensor([[3, 1, 4, 1, 5]])
    assert len(layers) == model.config.num_hidden_layers
    with torch.inference_mode():
        output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
        *inputs_, logits = Replay(model, layers)(
            lambda one: one(input_ids=ids, use_cache=False).logits, output.hidden_states[:-1]
        )
    assert torch.equal(logits, output.logits)
    assert all(map(torch.equal, inputs_, output.hidden_states))


def test_a_copy_with_random_weights_takes_no_more_memory_than_a_layer() -> None:
    model = deep(1.0)
    found = {weight.data_ptr(): weight.numel() for weight in tame(model).parameters()}
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters())
    ends = 64 * (256 + 64) + 64
    assert sum(found.values()) == layer + ends
    assert model.config.sliding_window == 4096 and tame(model).config.sliding_window == SLIDING


def test_a_pad_that_the_copy_has_no_row_for() -> None:
    """A pad with one of the last ids, as in most published models."""
    config = transformers.LlamaConfig(
        vocab_size=700,
        pad_token_id=600,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert tame(model)(input_ids=torch.tensor([[3, 1, 4]])).logits.shape[2] == 64
    target: Any = Target(model, check=False)
    with planted("position"), pytest.raises(UnsupportedModel, match="with random weights"):
        self_test(target, target.reference())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_a_copy_with_random_weights(name: str) -> None:
    """In both dtypes: without one the first question would be left to the model's own weights."""
    model = FAMILIES[name].build(torch.bfloat16)
    for dtype in (torch.float32, torch.float64):
        logits = tame(model, dtype)(input_ids=torch.tensor([[3, 1, 4]]), use_cache=False).logits
        assert logits.dtype == dtype and bool(logits.isfinite().all())


def test_no_hooks_remain() -> None:
    model = built("gpt2", torch.float32)
    Target(model, check=True)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
