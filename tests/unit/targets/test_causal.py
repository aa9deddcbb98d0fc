"""A causal target's forward: the inputs and outputs of the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.parametrizations import weight_norm
from torch.utils import backend_registration

from models import tiny_llama
from outpace import Engine, SamplingParams, Target
from outpace.cache import CacheFull, KVCache, Slot
from outpace.drafters.parallel.lookahead import Lookahead
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.inputs.surgery import exchange
from zoo.families import FAMILIES
from zoo.family import VOCABULARY

PROMPTS = [[5, 9, 2, 7, 7, 1, 30, 4], [3], [8, 1, 6, 6, 40]]
PARAMS = SamplingParams(max_new_tokens=20)
TREE = Rows([11, 12, 13, 14, 15], [-1, 0, 0, 1, 2])


def target_of(name: str = "llama", **options: Any) -> CausalTarget:
    target = Target(FAMILIES[name].build(), **options)
    assert isinstance(target, CausalTarget)
    return target


@contextmanager
def recorded(model: Any) -> Iterator[list[dict[str, Any]]]:
    """The arguments of every forward of the model."""
    calls: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True)
    yield calls
    hook.remove()


def fill(target: CausalTarget, cache: KVCache, prompts: list[list[int]]) -> list[Slot]:
    """A slot for each prompt, with its rows."""
    slots = []
    for prompt in prompts:
        slots.append(slot := cache.allocate())
        target.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(len(prompt))})
    return slots


def test_hidden_states() -> None:
    """Those of transformers, at every row of a tree, in a batch with padding."""
    target = target_of()
    cache = target.new_cache(2)
    slots = fill(target, cache, PROMPTS[:2])
    layers = [0, 1, 2, -1]
    output = target.forward(cache, Batch.of({slots[1]: [20, 21], slots[0]: TREE}), layers)
    assert all(sorted(output.hidden[slot]) == sorted(layers) for slot in slots)
    for place, paths in ((0, [[0, 1, 3], [0, 2, 4]]), (1, [[0, 1]])):
        for path in paths:
            tokens = TREE.tokens if place == 0 else [20, 21]
            text = torch.tensor([PROMPTS[place] + [tokens[node] for node in path]])
            stock = target.model(input_ids=text, output_hidden_states=True, use_cache=False)
            for layer in layers:
                expected = stock.hidden_states[layer][0, -len(path) :]
                assert torch.allclose(output.hidden[slots[place]][layer][path], expected, atol=1e-9)
    with torch.no_grad():
        head = target.model.get_output_embeddings()(output.hidden[slots[0]][-1])
    assert torch.allclose(head, output.logits_of(slots[0]), atol=1e-9)
    output = target.forward(cache, Batch.of(dict.fromkeys(slots, TREE), None), [1])
    assert output.logits is None and output.hidden[slots[1]][1].shape == (5, 32)


def test_logits_only_where_needed() -> None:
    target = target_of()
    cache = target.new_cache()
    slot = cache.allocate()
    with recorded(target.model) as calls:
        assert target.forward(cache, Batch.of({slot: [1, 2, 3]}, None)).logits is None
        cache.keep({slot: [0, 1, 2]})
        logits = target.forward(cache, Batch.of({slot: [4, 5, 6]})).logits
        last = target.forward(cache, Batch.of({slot: [4, 5, 6]}, 1)).logits
        states = target.forward(cache, Batch.of({slot: [4, 5, 6]}, None), (-1,))
    assert logits is not None and logits.shape == (3, VOCABULARY)
    assert last is not None and torch.allclose(last, logits[1:], rtol=1e-12)  # in float64, not bit-exact
    with torch.inference_mode():
        assert torch.equal(target.head(states.hidden_of(slot, 0, 3)[-1]), logits)
    assert [call["logits_to_keep"] for call in calls] == [1, 3, 2, slice(0)]


def test_states_alone_take_no_row_of_the_head() -> None:
    target = target_of()
    cache = target.new_cache(2)
    slots = [cache.allocate(), cache.allocate()]
    seen: list[int] = []
    models = [target._modules.step]
    for head in {model.get_output_embeddings() for model in models if model is not None}:
        head.register_forward_pre_hook(lambda module, given: seen.append(given[0][..., 0].numel()))
    target.keep_modules()  # or hooks of the model make a new line
    for widths in ((3,), (2, 2), (3, 1)):
        feeds = {slot: Rows([5] * width) for slot, width in zip(slots, widths, strict=False)}
        target.forward(cache, Batch.of(feeds, None), (-1,))
    assert seen == [0, 0, 0]


def test_a_model_without_logits_to_keep() -> None:
    class Old(transformers.LlamaForCausalLM):
        def forward(
            self,
            input_ids: Any,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            **kw: Any,
        ) -> Any:
            assert "logits_to_keep" not in kw
            return super().forward(input_ids, attention_mask, position_ids, past_key_values, **kw)

    new = FAMILIES["llama"].build()
    old = Old(new.config).double().eval()
    old.load_state_dict(new.state_dict())
    expected = Engine(new).generate(PROMPTS, PARAMS)
    assert [g.tokens for g in Engine(old).generate(PROMPTS, PARAMS)] == [g.tokens for g in expected]


def test_chunked_prefill() -> None:
    """The prompt's last token is the first root; the last chunk before it is part of the root's forward."""
    prompt = list(range(40, 60))
    answers = []
    for chunk, widths in ((7, [7, 5, 8]), (19, [20]), (1000, [20])):
        target = target_of()
        engine = Engine(target, prefill_chunk=chunk)
        with recorded(target.model) as calls:
            answers.append(engine.generate([prompt], PARAMS)[0].tokens)
        assert [call["input_ids"].shape[1] for call in calls] == [*widths, *[1] * 19]
    assert answers[0] == answers[1] == answers[2]


def test_static_forward_of_some_slots() -> None:
    """Slots before and after those that feed rows are padding, and not in the output."""
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for static in (False, True):
        target = target_of(static=static)
        cache = target.new_cache(4, 32)
        slot = fill(target, cache, PROMPTS)[1]
        output = target.forward(cache, Batch.of({slot: TREE}), [1])
        outputs.append((output.logits_of(slot), output.hidden_of(slot, 0, 5)[1]))
    dynamic, fixed = outputs
    assert fixed[0].shape == (5, VOCABULARY)
    assert torch.allclose(fixed[0], dynamic[0])
    assert torch.allclose(fixed[1], dynamic[1])


def test_outgrowing_a_static_cache() -> None:
    """An error before anything is written: what fits may still be fed."""
    target = target_of(static=True)
    cache = target.new_cache(1, 16)
    (slot,) = fill(target, cache, [list(range(14))])
    with pytest.raises(CacheFull, match="length >= 19"):
        target.forward(cache, Batch.of({slot: TREE}))
    logits = target.forward(cache, Batch.of({slot: [7, 8]})).logits_of(
        slot
    )  # its width's bucket may reach past the end
    plain = target.model(input_ids=torch.tensor([[*range(14), 7, 8]])).logits[:, -2:]
    assert torch.allclose(logits, plain)
    cache.keep({slot: range(2)})
    assert cache.length(slot) == 16


@pytest.mark.parametrize("slots", [1, 2])
def test_sequences_wait_for_a_static_slot(slots: int) -> None:
    expected = [g.tokens for g in Engine(target_of()).generate(PROMPTS, PARAMS)]
    engine = Engine(target_of(static=True), slots=slots, length=64)
    sequences = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
    most = 0
    while engine.sequences:
        most = max(most, len(engine.step()))
    assert most == slots
    assert [sequence.output for sequence in sequences] == expected


def test_shared_keys_and_values() -> None:
    """Layers that use another's keys and values keep none of their own."""
    if not hasattr(transformers, "Gemma3nTextConfig"):
        pytest.skip("this transformers has no Gemma3n")
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=[48] * 4,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    target = Target(model)
    assert isinstance(target, CausalTarget) and len(target.new_cache().layers) == 2
    ids = torch.tensor([PROMPTS[0]])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    found = (
        Engine(target, Lookahead(window=3, ngram=3), adaptive=False).generate([PROMPTS[0]], PARAMS)[0].tokens
    )
    assert found == expected[0, 8:].tolist()


def test_eos_tokens() -> None:
    model = FAMILIES["llama"].build()
    assert Target(model).eos_token_ids == frozenset()
    model.config.eos_token_id = 7
    assert Target(model).eos_token_ids == {7}
    model.generation_config.eos_token_id = [3, 4]
    assert Target(model).eos_token_ids == {3, 4}


def places_of(model: Any, devices: list[str]) -> dict[str, str]:
    """Module -> device, with layers on the devices in turn."""
    layers = len(model.model.layers)
    places = {f"model.layers.{i}": devices[i * len(devices) // layers] for i in range(layers)}
    first, last = devices[0], devices[-1]
    return places | {
        "model.embed_tokens": first,
        "model.rotary_emb": first,
        "model.norm": last,
        "lm_head": last,
    }


def spread(model: Any, devices: list[str]) -> Any:
    """The model with its layers on several devices in turn, as device_map="auto" leaves it."""
    accelerate = pytest.importorskip("accelerate")
    skipped = model._skip_keys_device_placement
    return accelerate.dispatch_model(
        model, places_of(model, devices), main_device=devices[0], force_hooks=True, skip_keys=skipped
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_spread_over_devices(name: str) -> None:
    """accelerate's hooks wrap every forward; with one device they must change nothing."""
    expected = [g.tokens for g in Engine(target_of(name)).generate(PROMPTS, PARAMS)]
    model = spread(FAMILIES[name].build(), ["cpu"])
    assert hasattr(model.model.layers[0], "_hf_hook")
    engine = Engine(model, Lookahead(window=3, ngram=3), adaptive=False)
    assert [g.tokens for g in engine.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.slow
def test_spread_over_two_devices_that_do_not_exist() -> None:
    """Every operation has its operands on one device: otherwise fake tensors raise an error."""
    pytest.importorskip("accelerate")
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch cannot pretend to have a kind of device")
    tests = Path(__file__).parents[2]
    paths = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("pretended.py")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():
        (first, last), found = json.loads(line)
        assert found["rows"] == [first, first, last, last]
        assert found["logits"] == first  # where accelerate returns what the model was given
        assert found["hidden"] == [first, first]
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_spread_over_two_devices(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    expected = [g.tokens for g in Engine(target_of(name)).generate(PROMPTS, PARAMS)]
    second = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    for devices in (["cuda:0", second], [second, "cuda:0"]):
        target = Target(spread(FAMILIES[name].build(), devices))
        shapes = target.new_cache().layers
        # accelerate runs layers on the CPU only if the first device is the CPU; otherwise it offloads them.
        used = {"cuda:0"} if devices[1] == "cpu" else set(devices)
        assert {str(shape.keys.device) for shape in shapes} == used
        engine = Engine(target, Lookahead(window=3, ngram=3), adaptive=False)
        assert [g.tokens for g in engine.generate(PROMPTS, PARAMS)] == expected


def test_offloaded_weights() -> None:
    """Weights that wait on another device until their layer runs: token ids go where the layer runs."""
    accelerate = pytest.importorskip("accelerate")
    expected = [g.tokens for g in Engine(target_of()).generate(PROMPTS, PARAMS)]
    model = accelerate.cpu_offload(FAMILIES["llama"].build(), execution_device="cpu")
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert [g.tokens for g in Engine(model).generate(PROMPTS, PARAMS)] == expected


def test_a_copy_of_modules_with_parametrizations() -> None:
    """As by weight_norm, which Apertus 1.5 has, and which ``copy.copy`` refuses."""
    model = tiny_llama()
    weight_norm(model.model.layers[0].mlp.up_proj)
    copied = exchange(model, lambda _: None, "sdpa")
    ids = torch.tensor([[5, 9, 11]])
    assert copied.model.layers[0].mlp.up_proj is not model.model.layers[0].mlp.up_proj
    assert torch.equal(copied(ids).logits, model(ids).logits)


def test_rows_in_windows_of_their_own_have_the_logits_of_each_alone() -> None:
    """Of prompts that are longer than others, of trees beside chains, and of one row after each."""
    target = CausalTarget(tiny_llama(context=256))
    cache = target.new_cache(slots=4)
    slots = [cache.allocate() for _ in range(4)]
    prompts = [[5, 9, 9, 2], [3, 1, 4, 1] * 20, [7], [2, 7] * 60]
    drafts = [Rows([1, 2, 3, 4], (-1, 0, 0, 2)), Rows([8]), Rows([4] * 90), Rows([6, 5])]
    feeds: list[dict[Slot, Rows]] = [
        dict(zip(slots, map(Rows, prompts), strict=True)),
        dict(zip(slots, drafts, strict=True)),
        {slot: Rows([11]) for slot in slots},
    ]
    for rows in feeds:
        batch = Batch.of(rows)
        expected = {}
        for slot in slots:
            alone = target.forward(cache, batch.select([slot])[0], [1])
            expected[slot] = alone.logits_of(slot).clone(), alone.hidden[slot][1].clone()
            cache.keep({})
        found = target.forward(cache, batch, [1])
        for slot, (logits, states) in expected.items():
            torch.testing.assert_close(found.logits_of(slot), logits)
            torch.testing.assert_close(found.hidden[slot][1][: len(states)], states)
        cache.keep(
            {slot: range(len(row.tokens)) if row.parents is None else [0, 2] for slot, row in rows.items()}
        )
    assert target.plan.layouts["padded"] > 12 + 3  # those of each alone, and more than one of all
