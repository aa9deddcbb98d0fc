"""Calls that outpace refuses and transformers decodes, and models in PEFT's wrapper."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import outpace
from outpace.core import OutpaceError, UnsupportedModel
from unit.hf.tiny import make

WHOLE = {"return_dict_in_generate": True}
# What is refused, by the name that the warning has.
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "output_hidden_states": {"output_hidden_states": True, **WHOLE},
    "output_attentions": {"output_attentions": True, **WHOLE},
    "guidance_scale": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_model": {"assistant_model": make("llama")},
}


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """A model that falls back, and one that nothing was done to."""
    return outpace.accelerate(make("llama"), "lookahead", fallback=True), make("llama")


class Streamer:
    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def tokens(model: Any, **options: Any) -> Any:
    found = model.generate(**options, max_new_tokens=8, do_sample=False)
    return getattr(found, "sequences", found).tolist()


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_has_the_stock_result_after_one_warning(both: Any, one: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=f"transformers decodes this call.*{name}") as told:
        found = tokens(both[0], **one, **REFUSED[name])
    assert len([own for own in told if "outpace" in str(own.message)]) == 1
    assert told[0].filename == __file__
    assert found == tokens(both[1], **one, **REFUSED[name])


def test_inputs_embeds_fall_back(both: Any, one: Any) -> None:
    embeds = both[1].get_input_embeddings()(one["input_ids"])
    with pytest.warns(UserWarning, match="inputs_embeds"):
        assert tokens(both[0], inputs_embeds=embeds) == tokens(both[1], inputs_embeds=embeds)


@pytest.mark.parametrize("more", [{}, REFUSED["output_attentions"]], ids=["decoded", "refused"])
def test_a_streamer_gets_all_of_it_once(both: Any, one: Any, more: Any) -> None:
    seen, expected = Streamer(), Streamer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens(both[0], **one, streamer=seen, **more)
    tokens(both[1], **one, streamer=expected, **more)
    assert seen.got == expected.got and len(seen.got) > 3


def test_a_call_that_is_decoded_does_not_fall_back(both: Any, one: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens(both[0], **one) == tokens(both[1], **one)


@pytest.mark.parametrize("model", ["gpt2", None])
def test_what_is_no_model_is_refused(model: Any) -> None:
    for change in (outpace.accelerate, outpace.restore):
        with pytest.raises(OutpaceError, match="takes a loaded model, not"):
            change(model)


def test_a_misspelt_argument_is_refused_with_the_one_meant(llama: Any) -> None:
    with pytest.raises(OutpaceError, match=r"no argument 'drafters'. Did you mean 'drafter'?"):
        outpace.accelerate(llama, drafters="suffix")
    with pytest.raises(OutpaceError, match="a verifier must be an instance or a spec string"):
        outpace.accelerate(llama, verifier=3)  # type: ignore[arg-type]


def test_compiled_models_and_those_without_weights_are_refused(llama: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"model\._orig_mod"):
        outpace.accelerate(torch.compile(llama))
    with pytest.raises(UnsupportedModel, match="device meta"):
        outpace.accelerate(llama.to("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stock", [False, True])
def test_half_precision_is_said_to_have_other_texts_than_stock(
    dtype: torch.dtype, stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("outpace.hf.tell", told.append)
    outpace.accelerate(make("llama").to(dtype), "none", stock=stock)
    assert len(told) == (dtype == torch.bfloat16 and not stock)
    assert all("give stock=True" in line for line in told)


@pytest.fixture
def adapted() -> tuple[Any, Any]:
    """An accelerated model of PEFT with two adapters, and the same one left alone."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options)
    plain = peft.get_peft_model(make("llama"), config)
    plain.add_adapter("other", config)
    plain.double().eval()
    fast = copy.deepcopy(plain)
    assert outpace.accelerate(fast, "lookahead") is fast
    return fast, plain


def test_a_model_of_peft_is_taken_as_it_is(adapted: Any, one: Any) -> None:
    fast, plain = adapted
    found = [tokens(fast, **one)]
    assert found[0] == tokens(plain, **one)
    for model in adapted:
        model.set_adapter("other")
    found.append(tokens(fast, **one))
    assert found[1] == tokens(plain, **one)
    with fast.disable_adapter(), plain.disable_adapter():
        found.append(tokens(fast, **one))
        assert found[2] == tokens(plain, **one)
    assert len({str(each) for each in found}) == 3
    assert copy.deepcopy(fast).generate(**one, num_beams=2, max_new_tokens=2) is not None  # a plain model
    assert outpace.restore(fast) is fast
    assert "generate" not in vars(fast.base_model.model)


def test_an_adapter_for_each_row_is_left_to_transformers(adapted: Any, one: Any) -> None:
    fast, plain = adapted
    more = {"input_ids": one["input_ids"].repeat(2, 1), "adapter_names": ["other", "default"]}
    with pytest.warns(UserWarning, match="adapter_names"):
        found = tokens(fast, **more)
    assert found == tokens(plain, **more)
    assert tokens(fast, **one) == tokens(plain, **one)


def test_adapters_of_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(UnsupportedModel, match="PromptTuningConfig changes what the model reads"):
        outpace.accelerate(model)
