"""accelerate() and restore(): one instance is touched, and copies of it are plain."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, pipeline

import outpace
from outpace.drafters.copying.prompt_lookup import PromptLookup
from outpace.hf import Generate
from outpace.targets.inputs.config import CACHE
from outpace.targets.stock import causal
from unit.hf.tiny import NEVER, Forwards, make


def test_only_the_instance_is_touched(llama: Any) -> None:
    method, names = LlamaForCausalLM.generate, set(vars(LlamaForCausalLM))
    before = dict(vars(llama))
    other = make("llama")
    assert outpace.accelerate(llama) is llama
    assert isinstance(llama.generate, Generate)
    assert set(vars(llama)) - set(before) == {"generate", "__getstate__"}
    assert LlamaForCausalLM.generate is method and set(vars(LlamaForCausalLM)) == names
    assert "generate" not in vars(other)
    assert outpace.restore(llama) is llama
    assert vars(llama) == before
    assert llama.generate.__func__ is method


def test_restore_of_a_plain_model(llama: Any) -> None:
    before = dict(vars(llama))
    outpace.restore(llama)
    assert vars(llama) == before


def test_accelerating_twice_replaces(llama: Any, one: Any) -> None:
    outpace.accelerate(llama, "lookahead")
    outpace.accelerate(llama, "none")
    counter = Forwards(llama)
    llama.generate(**one, max_new_tokens=20, eos_token_id=NEVER)
    assert counter.count == 20  # one for each token; the prompt rides in the first
    outpace.restore(llama)
    assert "generate" not in vars(llama) and "__getstate__" not in vars(llama)


def test_other_options_are_tested_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with other options are others: that some passed says nothing about these."""
    monkeypatch.setenv("OUTPACE_TESTED", "")
    asked: list[str] = []

    def disproves(*_: Any) -> str:
        asked.append("bits")
        return "sums in any order"

    model = make("llama").to(torch.bfloat16)
    with pytest.warns(UserWarning, match="'stock' is not bit-exact"):
        outpace.accelerate(model, "suffix", plan="stock")
    passed = causal.tested
    monkeypatch.setattr(causal, "tested", lambda *given: (asked.append("steps"), passed(*given))[1])
    with pytest.warns(UserWarning, match="'stock' is not bit-exact"):
        outpace.accelerate(model, "suffix", plan="stock")
    assert asked == []
    monkeypatch.setattr(causal, "why_bits_differ", disproves)
    with pytest.warns(UserWarning, match="not exact here.*sums in any order"):
        outpace.accelerate(model, "suffix")
    assert asked == ["bits", "steps"]
    with pytest.raises(outpace.OutpaceError, match="not bit-exact: sums in any order; leave exact out"):
        outpace.accelerate(model, "suffix", exact=True)


def test_a_mistake_leaves_the_acceleration_as_it_was(llama: Any) -> None:
    outpace.accelerate(llama, "lookahead")
    before = llama.generate
    with pytest.raises(outpace.OutpaceError):
        outpace.accelerate(llama, "no such drafter")
    assert llama.generate is before


def test_an_attribute_of_somebody_elses_is_not_replaced(llama: Any) -> None:
    llama.generate = print
    with pytest.raises(outpace.OutpaceError, match="'generate' of its own"):
        outpace.accelerate(llama)
    outpace.restore(llama)
    assert llama.generate is print


def through_torch_save(model: Any, folder: Path) -> Any:
    torch.save(model, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


COPIES: dict[str, Callable[[Any, Path], Any]] = {
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "copy": lambda model, _: copy.copy(model),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)),
    "pickle 2": lambda model, _: pickle.loads(pickle.dumps(model, protocol=2)),
    "torch.save": through_torch_save,
    "inside a list": lambda model, _: copy.deepcopy([model, model.generate])[0],
    "copy of a copy": lambda model, _: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_plain(name: str, llama: Any, one: Any, tmp_path: Path) -> None:
    expected = llama.generate(**one, max_new_tokens=20, eos_token_id=NEVER)
    names = set(vars(llama))
    outpace.accelerate(llama)
    other = COPIES[name](llama, tmp_path)
    assert set(vars(other)) == names
    assert other.generate.__func__ is LlamaForCausalLM.generate and other.generate.__self__ is other
    counter = Forwards(other)
    assert other.generate(**one, max_new_tokens=20, eos_token_id=NEVER).tolist() == expected.tolist()
    assert counter.count == 20
    assert isinstance(llama.generate, Generate)
    assert llama.generate(**one, max_new_tokens=20, eos_token_id=NEVER).tolist() == expected.tolist()
    outpace.accelerate(other)  # a copy can be accelerated by itself
    assert other.generate(**one, max_new_tokens=20, eos_token_id=NEVER).tolist() == expected.tolist()


def test_a_copied_method_is_that_of_the_copy(llama: Any) -> None:
    outpace.accelerate(llama)
    model, method = pickle.loads(pickle.dumps((llama, llama.generate)))
    assert method.__self__ is model


def test_save_pretrained(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "plain")
    outpace.accelerate(llama)
    llama.save_pretrained(tmp_path / "fast")
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "fast" / file.name).read_bytes() == file.read_bytes()
    assert list(llama.state_dict()) == list(make("llama").state_dict())


def test_it_looks_like_the_method(llama: Any) -> None:
    signature, doc = inspect.signature(llama.generate), llama.generate.__doc__
    outpace.accelerate(llama)
    assert inspect.signature(llama.generate) == signature
    assert llama.generate.__doc__ == doc


def test_arguments_by_position(plain: Any, fast: Any, one: Any) -> None:
    config = copy.copy(plain.generation_config)
    config.max_new_tokens = 7
    expected = plain.generate(one["input_ids"], config)
    assert fast.generate(one["input_ids"], config).tolist() == expected.tolist()
    with pytest.raises(TypeError):
        fast.generate(*[None] * 20)
    with pytest.raises(ValueError, match="no_such_option"):
        fast.generate(one["input_ids"], no_such_option=1)


def test_a_custom_generate_of_the_callers_goes_first(fast: Any, one: Any) -> None:
    assert fast.generate(**one, max_new_tokens=3, custom_generate=lambda model, *_, **__: "mine") == "mine"


@pytest.mark.parametrize("change", ["dtype", "attention", "vocabulary"])
def test_a_model_that_has_changed(change: str, llama: Any, one: Any) -> None:
    outpace.accelerate(llama)
    llama.generate(**one, max_new_tokens=3)
    if change == "dtype":
        llama.float()
    elif change == "attention":
        llama.set_attn_implementation("eager")
    else:
        llama.lm_head.bias = None  # resizing knows of no bias
        llama.resize_token_embeddings(300, mean_resizing=False)
    expected = LlamaForCausalLM.generate(llama, **one, max_new_tokens=20)
    assert llama.generate(**one, max_new_tokens=20).tolist() == expected.tolist()


def test_weights_that_have_changed(llama: Any, one: Any) -> None:
    outpace.accelerate(llama)
    before = llama.generate(**one, max_new_tokens=20)
    with torch.no_grad():
        llama.model.layers[0].mlp.down_proj.weight.mul_(-1)
    expected = LlamaForCausalLM.generate(llama, **one, max_new_tokens=20)
    assert llama.generate(**one, max_new_tokens=20).tolist() == expected.tolist() != before.tolist()


def test_threads(plain: Any, fast: Any, batch: Any) -> None:
    def call(length: int) -> list[list[int]]:
        tokens: list[list[int]] = fast.generate(**batch, max_new_tokens=length).tolist()
        return tokens

    lengths = [10, 17, 24, 31] * 2
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(call, lengths))
    for length, tokens in zip(lengths, found, strict=True):
        assert tokens == plain.generate(**batch, max_new_tokens=length).tolist()


def test_calls_inside_a_call(plain: Any, fast: Any, one: Any) -> None:
    """A criterion may itself generate: the engine in use is not lent twice."""
    inner: list[Any] = []

    def ask(input_ids: torch.Tensor, scores: Any) -> bool:
        inner.append(fast.generate(**one, max_new_tokens=4).tolist())
        return False

    expected = plain.generate(**one, max_new_tokens=6, eos_token_id=NEVER).tolist()
    found = fast.generate(**one, max_new_tokens=6, eos_token_id=NEVER, stopping_criteria=[ask])
    assert found.tolist() == expected
    assert inner == [plain.generate(**one, max_new_tokens=4).tolist()] * 6


def test_a_model_can_be_freed(one: Any) -> None:
    for undo in (outpace.restore, lambda _: gc.collect()):
        model = outpace.accelerate(make("llama"))
        model.generate(**one, max_new_tokens=3)
        gone = weakref.ref(model)
        undo(model)
        del model
        gc.collect()
        assert gone() is None


def test_the_memory_of_the_cache_is_given_back(llama: Any, batch: Any) -> None:
    outpace.accelerate(llama)
    llama.generate(**batch, max_new_tokens=30)
    (engine,) = llama.generate._engines._idle
    assert engine.room == (1, 1)
    assert not engine.sequences


def test_a_refusal_keeps_the_engine_and_an_error_drops_it(llama: Any, one: Any) -> None:
    outpace.accelerate(llama)
    engines = llama.generate._engines
    (engine,) = engines._idle
    with pytest.raises(outpace.OutpaceError):
        llama.generate(**one, max_new_tokens=3, attention_mask=torch.zeros_like(one["input_ids"]))
    assert engines._idle == [engine]
    with pytest.raises(ZeroDivisionError):
        llama.generate(**one, max_new_tokens=3, stopping_criteria=[lambda *_: 1 / 0])
    assert engines._idle == []
    llama.generate(**one, max_new_tokens=3)
    assert len(engines._idle) == 1


def test_the_self_test_runs_once(llama: Any, one: Any) -> None:
    counter = Forwards(llama)
    llama.generate(**one, max_new_tokens=2, custom_generate=outpace.decode("none"))
    first = counter.count
    llama.generate(**one, max_new_tokens=2, custom_generate=outpace.decode("none"))
    again = counter.count - first
    assert again == 3 < first  # one for the shapes of the cache, two tokens
    outpace.accelerate(llama, "none")
    before = counter.count
    llama.generate(**one, max_new_tokens=2)
    assert counter.count - before == 2


def test_results_can_be_used_for_training(llama: Any, one: Any) -> None:
    """They are no inference-mode tensors, just as those of the stock generate() are none."""
    outpace.accelerate(llama)
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found = llama.generate(**one, max_new_tokens=5, **asked)
    tensors = [found.sequences, *found.scores, *found.logits]
    tensors += [rows for layer in found[CACHE].layers for rows in (layer.keys, layer.values)]
    assert not any(tensor.is_inference() for tensor in tensors)
    loss = llama(found.sequences, labels=found.sequences).loss * found.scores[0].softmax(-1).max()
    loss.backward()
    assert llama.lm_head.weight.grad is not None


def test_in_a_pipeline(plain: Any, fast: Any, tokenizer: Any) -> None:
    texts = ["the one that", "sees"]
    results = [
        pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")(
            texts, max_new_tokens=20, do_sample=False, batch_size=2
        )
        for model in (plain, fast)
    ]
    assert results[0] == results[1]


def test_an_inference_mode_of_the_callers(plain: Any, fast: Any, batch: Any) -> None:
    with torch.inference_mode():
        expected = plain.generate(**batch, max_new_tokens=9)
        assert fast.generate(**batch, max_new_tokens=9).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "way", [lambda model, v: outpace.accelerate(model, "none", v), lambda _, v: outpace.decode("none", v)]
)
def test_a_lossy_verifier_warns(llama: Any, way: Any) -> None:
    """A lossy verifier warns, since generate() returns tokens only."""
    with pytest.warns(UserWarning, match=r"typical:.*lossy.* changes the model's output"):
        way(llama, "typical")
    way(llama, "rejection")  # pytest makes an error of a warning of ours


def test_a_governor_decides_where_that_is_asked_for(llama: Any) -> None:
    def governed(*given: Any, **options: Any) -> bool:
        made = outpace.accelerate(llama, *given, **options).generate._engines
        with made.lend(made.target(llama)) as engine:
            return engine.governor is not None

    assert governed("prompt_lookup") and not governed("prompt_lookup", adaptive=False)
    assert governed("prompt_lookup:num_speculative_tokens=4") and governed(PromptLookup())
    assert not governed("prompt_lookup", "rejection")


def test_a_governor_leaves_the_tokens_as_they_are(llama: Any, one: Any) -> None:
    stock = llama.generate(**one, max_new_tokens=30, eos_token_id=NEVER)
    fast = outpace.accelerate(llama, "prompt_lookup:num_speculative_tokens=4", adaptive=True)
    assert fast.generate(**one, max_new_tokens=30, eos_token_id=NEVER).tolist() == stock.tolist()


def test_sampling_by_distributions_under_a_governor_is_refused(llama: Any, one: Any) -> None:
    """The tokens of a seed would depend on the clock."""
    outpace.accelerate(llama, "prompt_lookup", "rejection", adaptive=True)
    with pytest.raises(outpace.OutpaceError, match="match"):
        llama.generate(**one, max_new_tokens=4, do_sample=True)
