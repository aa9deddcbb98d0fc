"""Numbers, functions, buffers and settings that are changed on a model after its target was made.

All of them are tried, since a list would miss what a new layer keeps. Tokens are then those of the model as
it is, or an error names what was changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import outpace
from outpace.core import OutpaceError
from outpace.engine.engine import Engine
from outpace.native.layers import functions
from outpace.targets import CausalTarget
from outpace.targets.batch import Batch
from outpace.targets.inputs.attributes import fingerprint
from outpace.targets.inputs.changes import Structure

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
PROMPT = [3, 6, 7, 11, 6, 7, 3, 40, 41, 42]
CALL = {"input_ids": torch.tensor([PROMPT]), "max_new_tokens": 4}
FUSED = not isinstance(functions(torch.float32), str)
_OWN = set(vars(nn.Module())) - {"training"}


def made(family: str) -> Any:
    config, kind = FAMILIES[family]
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    more = {"sliding_window": None} if family == "mistral" else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config(**sizes, **heads, **ends, **more, max_position_embeddings=64))
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * torch.randn_like(weight)
    return model.eval()


class Change(NamedTuple):
    """A change of a model that can be undone."""

    kind: str
    name: str
    do: Callable[[], None]
    undo: Callable[[], None]


def other(value: Any) -> Any:
    """Another value of the same type; None if there is no obvious one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 1.5 + 0.25
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list | tuple) and value and all(other(one) is not None for one in value):
        return type(value)(map(other, value))
    if isinstance(value, dict) and value and any(other(one) is not None for one in value.values()):
        return {key: one if other(one) is None else other(one) for key, one in value.items()}
    if callable(value) and not isinstance(value, nn.Module | Tensor | type):
        return lambda *given, **named: value(*given, **named) * 2
    return None


def set_in(space: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: space.__setitem__(name, value)


def changes(model: Any) -> Iterator[Change]:
    """Every attribute, buffer and setting, and every method that an attribute of the same name would hide."""
    configs: dict[int, Any] = {}
    for path, module in model.named_modules():
        kind, space = type(module).__name__, vars(module)
        for name, value in list(space.items()):
            if isinstance(value, PretrainedConfig):
                configs[id(value)] = value
            elif name not in _OWN and (changed := other(value)) is not None:
                yield Change(kind, name, set_in(space, name, changed), set_in(space, name, value))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                kept = buffer.clone()
                yield Change(
                    kind,
                    name,
                    lambda buffer=buffer: buffer.mul_(0.5),
                    lambda buffer=buffer, kept=kept: buffer.copy_(kept),
                )
                yield Change(
                    kind,
                    name,
                    set_in(module._buffers, name, buffer * 0.5),
                    set_in(module._buffers, name, buffer),
                )
        if not path.count(".") > 3 and "forward" in vars(type(module)):
            forward = module.forward
            yield Change(
                kind,
                "replaced",
                set_in(space, "forward", lambda *given, forward=forward, **named: forward(*given, **named)),
                lambda space=space: space.pop("forward"),
            )
    for config in configs.values():
        space = vars(config)
        for name, value in list(space.items()):
            if (changed := other(value)) is not None:
                yield Change(
                    "config", name, set_in(space, name, changed), set_in(space, name, copy.deepcopy(value))
                )


def logits(of: CausalTarget) -> Tensor:
    cache = of.new_cache(length=16)
    slot = cache.allocate()
    found = of.forward(cache, Batch.of({slot: PROMPT}, prompt=len(PROMPT))).logits_of(slot).clone()
    cache.keep({slot: range(len(PROMPT))})
    return found


def stock(model: Any) -> Tensor | None:
    """The model's own logits; None if the change breaks it."""
    try:
        with torch.inference_mode():
            found: Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    except Exception:
        return None
    return found


@pytest.mark.parametrize("options", [{}, {"plan": "stock"}], ids=["fused", "stock"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_follows_or_refuses_every_change(family: str, options: Any) -> None:
    model = made(family)
    of = CausalTarget(model, check=False, **options)
    assert of.plan.native == (FUSED and not options)
    before, missed, seen, refused = logits(of), [], 0, 0
    plain = stock(model)
    for change in changes(model):
        change.do()
        expected = stock(model)
        try:
            found: Tensor | None = logits(of)
        except OutpaceError as error:
            found, refused = None, refused + 1
            assert change.name in str(error), f"{change}: {error}"
        except Exception:
            if expected is not None:
                raise
            found = None
        if found is not None and (expected is None or not torch.allclose(found, expected, atol=1e-4)):
            missed.append(f"{change.kind}.{change.name}")
        seen += expected is None or not torch.equal(expected, plain)
        change.undo()
        assert torch.equal(logits(of), before), f"{change.kind}.{change.name} was undone"
    assert not missed, missed
    assert seen > 8 and refused


def check_accelerated(family: str) -> None:
    model = outpace.accelerate(made(family), "lookahead")
    kind, tried, missed, texts = FAMILIES[family][1], set(), [], set()
    for change in changes(model):
        if (change.kind, change.name) in tried and change.name != "inv_freq":
            continue
        if change.name in ("generate", "__getstate__"):  # the accelerated model's own
            continue
        tried.add((change.kind, change.name))
        change.do()
        try:
            expected: Any = kind.generate(model, **CALL)[0].tolist()
        except Exception:
            expected = None
        try:
            found = model.generate(**CALL)[0].tolist()
        except OutpaceError as error:
            found = expected
            assert change.name in str(error), f"{change}: {error}"
        except Exception:
            if expected is not None:
                raise
            found = None
        change.undo()
        if expected is not None and found != expected:  # a change may break the stock model alone
            missed.append(f"{change.kind}.{change.name}")
        texts.add(str(expected))
    assert not missed, missed
    assert len(texts) > 3
    assert model.generate(**CALL)[0].tolist() == kind.generate(model, **CALL)[0].tolist()


def test_an_accelerated_model_has_the_tokens_of_stock_after_every_change() -> None:
    check_accelerated("qwen3")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_so_have_those_of_other_families(family: str) -> None:
    check_accelerated(family)


def test_rows_of_a_prefix_are_not_used_with_other_frequencies() -> None:
    model = made("qwen3")
    of = Engine(CausalTarget(model, check=False), "none", prefix_cache=1 << 24)
    prompt, params = PROMPT * 4, outpace.SamplingParams(6, ignore_eos=True)
    assert [of.generate([prompt], params)[0].stats.cached_tokens for _ in range(2)] == [0, 32]
    for write in (
        lambda: model.model.rotary_emb.inv_freq.mul_(0.5),
        lambda: model.model.rotary_emb.register_buffer("inv_freq", model.model.rotary_emb.inv_freq * 3),
    ):
        write()
        found = of.generate([prompt], params)[0]
        assert found.stats.cached_tokens == 0
        fresh = Engine(CausalTarget(model, check=False), "none")
        assert list(found.tokens) == list(fresh.generate([prompt], params)[0].tokens)


def test_an_engine_refuses_a_changed_number_by_its_name() -> None:
    model = made("qwen3")
    of = Engine(CausalTarget(model, check=False), "none")
    params = outpace.SamplingParams(2)
    of.generate([PROMPT], params)
    attention = model.model.layers[0].self_attn
    attention.scaling, before = 0.5, attention.scaling
    with pytest.raises(OutpaceError, match=r"attn\.scaling was 0\.17.* and is 0\.5 .*new target"):
        of.generate([PROMPT], params)
    attention.scaling = before
    of.generate([PROMPT], params)


def test_classes_and_their_forwards_and_tensors_that_are_no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("qwen3")
    model.model.rotary_emb.extra = torch.ones(2)
    watched = Structure(model)
    assert watched.changed() is None
    model.model.rotary_emb.extra = torch.ones(2)
    assert "the tensor extra" in str(watched.changed())
    watched = Structure(model)
    kind = type(model.model.norm)
    with monkeypatch.context() as patched:
        patched.setattr(kind, "forward", lambda self, states: states)
        assert f"{kind.__name__}.forward was replaced" in str(watched.changed())
        why = CausalTarget(model, check=False).plan.why_not("native")
        assert not FUSED or why == f"the forward of {kind.__name__} is not its own"
    assert watched.changed() is None
    model.model.norm.__class__ = type("Other", (kind,), {})
    assert "the class of a module" in str(watched.changed())


def test_what_a_forward_sets_is_not_watched() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.scale = 0, 2.0

        def forward(self, states: Tensor) -> Tensor:
            return self.scaled(states)

        def scaled(self, states: Tensor) -> Tensor:
            self.last = states.shape[0]
            return states * self.scale

    model = made("qwen3")
    model.model.norm = own = Norm()
    watched, found = Structure(model), fingerprint(model)
    stock(model)
    assert own.last == 1 and watched.changed() is None and fingerprint(model) == found
    own.scale = 3.0
    assert "norm.scale was 2.0" in str(watched.changed())


def test_lists_that_are_changed_in_place_and_methods_that_are_hidden() -> None:
    model = made("qwen3")
    model.model.norm.factors = {"default": [1.0, 2.0]}
    watched = Structure(model)
    model.model.norm.factors["default"][1] = 3.0
    assert "norm.factors was" in str(watched.changed())
    watched = Structure(model)
    model.model.unread = 5  # nothing has an attribute of this name
    assert watched.changed() is None
    model.model.norm.extra_repr = lambda: "x"
    assert "norm.extra_repr was set" in str(watched.changed())


@pytest.mark.skipif(not FUSED, reason="nothing is compiled here")
def test_layers_that_are_not_as_their_config_makes_them_are_not_fused() -> None:
    for path, name, value in (
        ("self_attn", "scaling", 0.5),
        ("self_attn", "is_causal", False),
        ("input_layernorm", "variance_epsilon", 0.25),
        ("post_attention_layernorm", "variance_epsilon", 0.25),
        ("self_attn.q_norm", "variance_epsilon", 0.25),
        ("mlp", "act_fn", nn.GELU()),
    ):
        model = made("qwen3")
        setattr(model.model.layers[0].get_submodule(path), name, value)
        assert name in CausalTarget(model, check=False).plan.why_not("native")
    assert CausalTarget(made("qwen3"), check=False).plan.native


def test_a_fingerprint_is_another_once_a_list_or_a_function_is() -> None:
    model = made("qwen3")
    mlp = model.model.layers[0].mlp
    found = {fingerprint(model)}
    mlp.factors = {"default": [1.0]}
    found.add(fingerprint(model))
    mlp.factors["default"][0] = 2.0
    found.add(fingerprint(model))
    model.config.rope_parameters["rope_theta"] = 5.0
    found.add(fingerprint(model))
    assert len(found) == 4
