"""Trained modules: their folders, and mismatches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models import tiny_llama
from outpace.core import OutpaceError
from outpace.learned.learned import Learned, PartialHead, head_weights, read_config
from outpace.native.layers import functions
from outpace.targets import Target
from outpace.targets.batch import Batch
from outpace.targets.cpu.kernels import Compiled
from outpace.targets.cpu.linear import Linear
from outpace.targets.cpu.trials import Trial
from outpace.targets.kernel import StockKernel
from outpace.testing import ToyTarget


@dataclass(frozen=True)
class Options:
    width: int = 3
    places: tuple[int, ...] = (1, 2)


class Heads(Learned):
    method: ClassVar[str] = "heads"
    config_type: ClassVar[type[Any]] = Options

    def __init__(self, config: Options, fit: Any) -> None:
        super().__init__(config, fit)
        self.down = nn.Linear(fit.hidden_size, config.width)


class Others(Heads):
    method = "others"


def test_a_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    target = ToyTarget()
    made = Heads.new(Options(width=5, places=(2, 3)), target)
    made.save(tmp_path / "new" / "folder")
    found = Heads.load(tmp_path / "new" / "folder", target)
    assert found.config == made.config and found.target is target
    assert not found.training and not any(weight.requires_grad for weight in found.parameters())
    assert found.down.weight.dtype == target.hidden.dtype
    assert torch.equal(found.down.weight, made.down.weight.double())
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert Heads.of(found, target) is found


def test_each_thing_that_does_not_fit_is_named(tmp_path: Path) -> None:
    target = ToyTarget()
    Heads.new(Options(), target).save(tmp_path)

    def refused(match: str, cls: type[Learned] = Heads, other: ToyTarget = target) -> None:
        with pytest.raises(OutpaceError, match=match):
            cls.load(tmp_path, other)

    refused(
        "made for ToyTarget with a vocabulary of 32, but this target, ToyTarget, has 9", other=ToyTarget(9)
    )
    refused("is of the method 'heads', not 'others'", Others)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    described = json.loads(config.read_text())
    del described["digest"]  # as in folders of the first format, since it refuses all changes alike
    text, tensors = json.dumps({**described, "format": 1}), load_file(weights)
    for change, match in [
        ({"format": 2}, "it has no digest"),
        ({"format": 3}, "has format 3"),
        ({"config": {"depth": 2}}, "is not one of heads: .*depth"),
        ({"config": {"width": 4}}, r"tensor 'down.weight' has shape \[3, 16\], .* should have \[4, 16\]"),
    ]:
        config.write_text(json.dumps(json.loads(text) | change))
        refused(match)
    config.write_text(text)
    save_file({"down.weight": tensors["down.weight"]}, weights)
    refused(r"heads for ToyTarget\): there is no tensor 'down.bias', of shape \[3\]")
    save_file(tensors | {"up": torch.zeros(2)}, weights)
    refused(r"tensor 'up', of shape \[2\], is not expected by")
    weights.write_bytes(b"no weights")
    refused("model.safetensors cannot be read")
    config.write_text("{")
    refused("is not JSON")
    config.unlink()
    refused("train one with: outpace train heads")


def test_options_saved_under_their_former_names_are_read(tmp_path: Path) -> None:
    saved = {"nodes": 3, "num_lookahead": 2, "heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"method": "heads", "format": 1, "config": saved}))
    found = read_config(tmp_path, "heads")["config"]
    assert found == {"max_nodes": 3, "num_speculative_tokens": 2, "heads": 4}


def test_a_module_stays_with_its_target() -> None:
    target = ToyTarget()
    with pytest.raises(OutpaceError, match="no target yet"):
        _ = Heads(Options(), Heads.new(Options(), target).fit).target
    with pytest.raises(OutpaceError, match="load one per target"):
        Heads.new(Options(), target).bind(ToyTarget(seed=1))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ("LlamaConfig", {}),
        ("Gemma2Config", {"final_logit_softcapping": 2.0, "head_dim": 8}),
        ("CohereConfig", {"logit_scale": 0.25}),
        ("GraniteConfig", {"logits_scaling": 4.0}),
    ],
)
def test_a_target_shares_its_head_and_embeddings(config: str, options: dict[str, Any]) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    own = getattr(transformers, config)(**sizes, **heads, **options)
    target = Target(transformers.AutoModelForCausalLM.from_config(own).double().eval())
    cache = target.new_cache()
    slot = cache.allocate()
    output = target.forward(cache, Batch.of({slot: [5, 6, 7]}), (0, -1))
    states = output.hidden[slot][-1]
    assert output.logits is not None and target.hidden.size == states.shape[-1]
    with torch.inference_mode():
        assert torch.allclose(target.head(states), output.logits)
    assert target.embed(torch.tensor([[5, 6]])).shape == (1, 2, target.hidden.size)
    weights = head_weights(target)
    assert (weights is None) == ("final_logit_softcapping" in options)
    if weights is not None:
        matrix, bias = weights
        assert torch.allclose(states @ matrix.T + bias, output.logits)


def test_a_head_with_a_bias_is_a_matrix_and_that_bias() -> None:
    model = tiny_llama()
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, model.config.vocab_size, dtype=model.dtype))
    found = head_weights(Target(model))
    assert found is not None
    assert torch.allclose(found[0], model.lm_head.weight) and torch.allclose(found[1], model.lm_head.bias)


def test_the_weights_of_a_plain_head_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applying the head to all units instead would delay the first draft by most of a second."""
    target = Target(tiny_llama())
    applied: list[int] = []
    head = target.head

    def counted(states: torch.Tensor) -> torch.Tensor:
        applied.append(states.reshape(-1, states.shape[-1]).shape[0])
        return head(states)

    monkeypatch.setattr(target, "head", counted)
    found = head_weights(target)
    assert found is not None and torch.equal(found[0], target.model.lm_head.weight)
    assert not found[0].requires_grad and 0 < sum(applied) < target.hidden.size


def test_gradients_reach_the_states_and_not_the_target() -> None:
    target = Target(tiny_llama())
    states = torch.zeros(1, 32, requires_grad=True)
    assert target.head(states).requires_grad and not target.embed(torch.tensor([1])).requires_grad


class Copying(StockKernel):
    """The stock kernel with a copy of the weights."""

    name = "copying"
    copies = True

    def pack(self, weight: Tensor) -> Tensor:
        return weight.clone()


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Copying:
    """The kernel that is the fastest here."""
    kernel = Copying()
    monkeypatch.setattr("outpace.targets.cpu.linear.best_kernel", lambda *_: Trial(kernel, False, 1, {}))
    return kernel


def test_weights_of_a_folder_are_packed_for_drafting(tmp_path: Path, copying: Copying) -> None:
    target = Target(tiny_llama().float())
    own = Heads.new(Options(), target)
    own.save(tmp_path)
    packed, plain = Heads.of(tmp_path, target), Heads.of(tmp_path, target, pack=False)
    assert isinstance(packed.down, Linear) and packed.down.kernel is copying
    assert type(plain.down) is nn.Linear
    assert Heads.of(own, target) is own and type(own.down) is nn.Linear
    states = torch.randn(3, target.hidden.size)
    assert torch.equal(packed.down(states), plain.down(states))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_weights_are_rounded_for_drafting_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    if isinstance(why := functions(dtype), str):
        pytest.skip(why)
    trial = Trial(Compiled(), False, 1, {})
    monkeypatch.setattr("outpace.targets.cpu.linear.best_kernel", lambda *_: trial)
    monkeypatch.setattr(Compiled, "least", {})
    target = Target(tiny_llama().to(dtype))
    Heads.new(Options(), target).save(tmp_path)
    packed, plain = Heads.of(tmp_path, target), Heads.of(tmp_path, target, pack=False)
    states = torch.randn(3, target.hidden.size, dtype=dtype)
    assert packed.down.kernel.rounds == (dtype == torch.bfloat16)
    head = PartialHead(target, torch.tensor([5, 2, 9]))
    with torch.inference_mode():
        expected = target.head(states)[:, [5, 2, 9]]
        assert (head(states) - expected).abs().max() < 0.02 * expected.abs().max()
    assert head._drafting()[0].kernel.rounds == (dtype == torch.bfloat16)  # type: ignore[index]
    assert torch.allclose(packed.down(states), plain.down(states), atol=0.02)


def test_a_part_of_the_head_is_packed_while_drafting(copying: Copying) -> None:
    target = Target(tiny_llama().float())
    head = PartialHead(target, torch.tensor([5, 2, 9]))
    states = torch.randn(4, target.hidden.size, dtype=target.hidden.dtype)
    used: list[int] = []
    stock = copying.multiply
    copying.multiply = lambda *given: used.append(len(given[0])) or stock(*given)  # type: ignore[method-assign, func-returns-value]
    expected = target.head(states)[:, [5, 2, 9]]
    learning = states.clone().requires_grad_()
    head(learning).sum().backward()
    assert used == [] and learning.grad is not None
    with torch.inference_mode():
        assert torch.allclose(head(states), expected, atol=1e-5)
    assert used == [4]
