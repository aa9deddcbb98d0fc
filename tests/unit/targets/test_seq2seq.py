"""Encoder-decoder targets: sources, the ways to pass positions, and no change of the model."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outpace
from examples_of import output_of
from outpace import ContextOverflow, Engine, OutpaceError, SamplingParams, Target, UnsupportedModel
from outpace.cache import Slot
from outpace.core import Source
from outpace.drafters.models.draft_model import DraftModel
from outpace.targets import CausalTarget, Rows, Seq2SeqTarget
from outpace.targets.batch import Batch
from outpace.targets.inputs import positions, refusals
from outpace.targets.inputs.config import CACHE
from outpace.targets.stock.encoder import EncodedStates
from outpace.targets.stock.seq2seq_cache import Seq2SeqCache
from outpace.testing import ToyTarget
from zoo.seq2seq_families import CHAIN_FAMILIES, COUNTING_FAMILIES, SEQ2SEQ_FAMILIES, START

PARENTS = (-1, 0, 0, 1, 1, 2, 4)
PATHS = ((0, 1, 3), (0, 1, 4, 6), (0, 2, 5))
TREE = [5, 9, 14, 20, 31, 47, 60]
LENGTHS = (12, 5)
KINDS = {"t5": positions.ByBias, "bart": positions.ByHook, "whisper": positions.ByArgument}


def target_of(name: str, **options: Any) -> Seq2SeqTarget:
    families = {**SEQ2SEQ_FAMILIES, **COUNTING_FAMILIES, **CHAIN_FAMILIES}
    dtype = torch.float32 if name == "fsmt" else torch.float64
    target = Target(families[name].build(dtype), **options)
    assert isinstance(target, Seq2SeqTarget)
    return target


def opened(
    target: Seq2SeqTarget, sources: list[Source], prompts: list[list[int]]
) -> tuple[Seq2SeqCache, list[Slot]]:
    """A cache with a slot for each source, the prompts in it."""
    cache, slots = target.new_cache(slots=1, length=4), []
    for source, prompt in zip(sources, prompts, strict=True):
        slots.append(slot := target.open(cache, source))
        target.forward(cache, Batch.of({slot: prompt}, None))
        cache.keep({slot: range(len(prompt))})
    return cache, slots


@torch.inference_mode()
def plain(target: Seq2SeqTarget, source: Source, text: list[int]) -> Tensor:
    """The logits of a text, by a plain forward of the model."""
    logits: Tensor = target.model(
        encoder_outputs=(source.states[None],), decoder_input_ids=torch.tensor([text]), use_cache=False
    ).logits
    return logits[0]


def close(found: Tensor, expected: Tensor) -> bool:
    # T5 computes its norms in float32 always.
    return torch.allclose(found, expected, rtol=0, atol=1e-5) and bool(found.std() > 0.1)


@pytest.mark.parametrize("name", SEQ2SEQ_FAMILIES)
def test_a_tree_has_the_logits_of_its_paths(name: str) -> None:
    """Also far back: T5 counts distances exactly up to a few tokens, in logarithmic buckets after that."""
    target = target_of(name, check=False)
    sources = [target.encode(source) for source in SEQ2SEQ_FAMILIES[name].sources(LENGTHS)]
    prompts = [[START, *range(3, 40)], [START, 7]]
    cache, slots = opened(target, sources, prompts)
    feeds = {slots[0]: Rows(TREE, PARENTS), slots[1]: Rows([11, 12])}
    output = target.forward(cache, Batch.of(feeds), (0, -1))
    tree, beside = (output.logits_of(slot) for slot in slots)
    for path in PATHS:
        text = prompts[0] + [TREE[node] for node in path]
        assert close(tree[list(path)], plain(target, sources[0], text)[-len(path) :])
    assert close(beside, plain(target, sources[1], [*prompts[1], 11, 12])[-2:])
    assert not close(beside, plain(target, sources[0], [*prompts[1], 11, 12])[-2:])
    assert all(states.shape == (len(TREE), 32) for states in output.hidden[slots[0]].values())
    last = target.forward(cache, Batch.of(feeds, 3))
    assert close(last.logits_of(slots[0]), tree[3:]) and not len(last.logits_of(slots[1]))


@pytest.mark.parametrize("name", [name for name, one in SEQ2SEQ_FAMILIES.items() if not one.features])
def test_texts_read_together_have_the_states_and_logits_of_each_alone(name: str) -> None:
    """Sources and texts of different lengths, of which neither may see the pads of another."""
    target = target_of(name, check=False)
    sources = SEQ2SEQ_FAMILIES[name].sources((12, 5, 7))
    texts = [[START, 7], [START, *range(3, 40)], [START, 9, 11, 0, 12]]
    states, logits = target.read_texts(list(zip(sources, texts, strict=True)), (0, -1), scored=True)
    for source, text, own, scores in zip(sources, texts, states, logits, strict=True):
        encoded = target.encode(source)
        cache = target.new_cache(1, len(text))
        slot = target.open(cache, encoded)
        output = target.forward(cache, Batch.of({slot: text}), (0, -1))
        alone = output.hidden_of(slot, 0, len(text))
        assert all(close(own[layer], alone[layer]) for layer in (0, -1))
        assert close(scores, plain(target, encoded, text)) and close(scores, output.logits_of(slot))


@pytest.mark.parametrize("name", ["t5", "bart", "marian-two-vocabularies"])
def test_texts_are_read_without_the_head(name: str) -> None:
    model = SEQ2SEQ_FAMILIES[name].build()
    target = Target(model, check=False)
    texts = [(source, [START, 7, 9]) for source in SEQ2SEQ_FAMILIES[name].sources((12, 5))]
    expected, _ = target.read_texts(texts, (0, -1), scored=True)

    def refuse(*given: Any) -> None:
        raise AssertionError("the head was run")

    model.get_output_embeddings().register_forward_pre_hook(refuse)
    found, logits = target.read_texts(texts, (0, -1), scored=False)
    assert not logits
    for own, other in zip(found, expected, strict=True):
        assert all(close(own[layer], other[layer]) for layer in (0, -1))


def test_features_are_not_read_as_text() -> None:
    with pytest.raises(OutpaceError, match=r"whisper\) reads features, of which texts have none"):
        target_of("whisper", check=False).read_texts([([3, 4], [START, 5])], (-1,), scored=False)


@pytest.mark.parametrize("name", SEQ2SEQ_FAMILIES)
def test_the_head_gives_the_logits_of_the_last_states(name: str) -> None:
    target = target_of(name, check=False)
    cache, (slot,) = opened(target, [target.encode(SEQ2SEQ_FAMILIES[name].sources((5,))[0])], [[START]])
    output = target.forward(cache, Batch.of({slot: [5, 9, 14]}), (-1,))
    states = output.hidden_of(slot, 0, 3)[-1]
    assert close(target.head(states), output.logits_of(slot))
    assert target.hidden.size == states.shape[1] and target.embed(torch.tensor([3, 4])).shape[0] == 2


def test_a_head_that_is_not_linear_is_refused() -> None:
    """Heads trained on it would otherwise learn other predictions than the model's."""
    model = SEQ2SEQ_FAMILIES["bart"].build()

    def squash(model: Any, args: Any, output: Any) -> None:
        output.logits = output.logits.tanh()

    model.register_forward_hook(squash)
    with pytest.raises(OutpaceError, match="shares no head"):
        Target(model, check=False).head(torch.zeros(1, 32))


def test_slots_keep_their_sources() -> None:
    """A slot that is given back is filled by the last one, whose source moves along; more slots than room."""
    target = target_of("bart", check=False)
    sources = [target.encode(list(range(3, 3 + length))) for length in (4, 9, 6, 2)]
    cache = target.new_cache(slots=1, length=2)
    slots = [target.open(cache, source) for source in sources[:3]]
    cache.free(slots[0])
    last = target.open(cache, sources[3])
    cache.free(slots[1])
    assert len(cache) == len(cache.sources) == 2
    output = target.forward(cache, Batch.of({last: [START], slots[2]: [START]}))
    for slot, source in ((slots[2], sources[2]), (last, sources[3])):
        assert cache.sources.length(cache.beside[slot]) == len(source.states)
        assert close(output.logits_of(slot), plain(target, source, [START]))


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_the_self_test_decides(monkeypatch: pytest.MonkeyPatch, name: str, kind: type) -> None:
    """Each way to place rows is there because without it the family would be refused."""
    model = SEQ2SEQ_FAMILIES[name].build()
    assert isinstance(Target(model)._positioning, kind)  # type: ignore[attr-defined]
    for part in ("arguments", "during", "mask"):
        monkeypatch.setattr(kind, part, getattr(positions.Positioning, part))
    with pytest.raises(UnsupportedModel, match=f"{model.config.model_type}.*paths"):
        Target(model)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Broken(Exception):
    pass


def test_the_hook_is_gone_after_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after one that fails; and no class has changed."""
    model = SEQ2SEQ_FAMILIES["marian"].build()
    methods = dict(vars(type(model.get_decoder().embed_positions)))
    before = hooks_of(model)
    target = Target(model)
    source = target.encode([4, 5, 6])
    assert hooks_of(model) == before

    during = []

    def fails(*args: Any, **kwargs: Any) -> Any:
        during.append(hooks_of(model))
        raise Broken

    cache = target.new_cache()
    slot = target.open(cache, source)
    monkeypatch.setattr(model.lm_head, "forward", fails)
    with pytest.raises(Broken):
        target.forward(cache, Batch.of({slot: [START]}))
    assert during == [before + 2]
    assert hooks_of(model) == before
    assert dict(vars(type(model.get_decoder().embed_positions))) == methods


@pytest.mark.parametrize("name", ["bart", "m2m-100"])
def test_the_hook_lets_other_threads_pass(name: str) -> None:
    """A forward of the bare model, in another thread, while the hook is set."""
    target = target_of(name)
    source = target.encode([4, 5, 6, 7])
    expected = plain(target, source, [START, 9, 8])
    found: list[Tensor] = []
    given = torch.tensor([[START, 9, 8]]), torch.tensor([[30, 30, 30]])
    with target._positioning.during(*given, mask=None):
        thread = threading.Thread(target=lambda: found.append(plain(target, source, [START, 9, 8])))
        thread.start()
        thread.join()
        here = plain(target, source, [START, 9, 8])
    assert torch.equal(found[0], expected)
    assert not torch.allclose(here, expected)


@pytest.mark.parametrize("name", ["m2m-100", "fsmt", "seamless-m4t", "nllb-moe", "umt5"])
def test_a_pad_in_a_draft(name: str) -> None:
    """Tables that skip pads are asked as in plain decoding, where a pad is alone in its forward."""
    target = target_of(name)
    source, text = target.encode([4, 5, 6, 7]), [START, 9, 0, 8, 0, 7]
    given: dict[str, Any] = {"encoder_outputs": EncodedStates(last_hidden_state=source.states[None])}
    with torch.inference_mode():
        for token in text:
            output = target.model(decoder_input_ids=torch.tensor([[token]]), use_cache=True, **given)
            given[CACHE] = output[CACHE]
    cache = target.new_cache()
    slot = target.open(cache, source)
    found = target.forward(cache, Batch.of({slot: text})).logits_of(slot)
    assert torch.allclose(found[-1], output.logits[0, -1], atol=1e-4)


@pytest.mark.parametrize(("name", "reason"), [("led", "other logits for a tree"), ("nllb-moe", "tree")])
def test_a_misused_mask_is_seen(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MISUSED", {})
    with pytest.raises(UnsupportedModel, match=reason):
        target_of(name)


def test_the_model_is_left_as_it_is() -> None:
    model = SEQ2SEQ_FAMILIES["t5"].build()
    ids, start = torch.tensor([[4, 5, 6]]), torch.tensor([[START, 8]])
    before = model(input_ids=ids, decoder_input_ids=start).logits
    engine = Engine(model, "lookahead:window=3,ngram=3,guesses=3", adaptive=False)
    engine.generate([[START]], SamplingParams(max_new_tokens=5), sources=[[4, 5, 6]])
    assert torch.equal(model(input_ids=ids, decoder_input_ids=start).logits, before)


def test_a_source_is_encoded_once() -> None:
    """And can be shared; the seconds it takes are prefill."""
    model = SEQ2SEQ_FAMILIES["t5"].build()
    calls: list[int] = []
    model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    engine = Engine(model)
    calls.clear()
    params = SamplingParams(max_new_tokens=6)
    one = engine.generate([[START]], params, sources=[[4, 5, 6]])[0]
    assert calls == [1] and one.stats.steps == len(one.tokens) == 6
    source = engine.target.encode([4, 5, 6])
    assert [g.tokens for g in engine.generate([[START]] * 2, params, sources=[source] * 2)] == [
        one.tokens
    ] * 2
    assert calls == [1, 1]
    streamed = [t.token for t in engine.stream([START], params, source=source)]
    assert streamed == one.tokens


def test_the_source_is_the_first_reference() -> None:
    engine = Engine(target_of("t5", check=False))
    sequence = engine.add([START], source=[4, 5, 6])
    assert sequence.references == ((4, 5, 6),) and sequence.source is not None
    two = Engine(target_of("marian-two-vocabularies", check=False))
    assert two.add([START], source=[4, 5, 119]).references == ()
    heard = Engine(target_of("whisper", check=False))
    assert heard.add([START], source=SEQ2SEQ_FAMILIES["whisper"].sources((1,))[0]).references == ()


def test_the_context_is_the_decoders() -> None:
    target = target_of("bart", check=False)
    assert target.context == 64 and target.start == (START,)
    assert target_of("t5", check=False).context is None
    generation = Engine(target).generate([[START] * 60], SamplingParams(max_new_tokens=9), sources=[[4]])[0]
    assert len(generation.tokens) == 4 and generation.finish_reason == "length"


FEATURES = torch.zeros(8, 24)
WRONG: list[tuple[str, Any, str]] = [
    ("t5", None, "t5.*needs a source"),
    ("t5", [], "empty"),
    ("t5", 7, "list of token ids"),
    ("t5", ["a"], "list of token ids"),
    ("t5", [96], "outside its vocabulary of 96"),
    ("t5", [-1], "outside"),
    ("t5", Source(torch.zeros(3, 31)), r"\[length, 32\], not \[3, 31\]"),
    ("t5", Source(torch.zeros(0, 32)), r"not \[0, 32\]"),
    ("whisper", [1, 2], "reads features.*not a list"),
    ("whisper", FEATURES[None], r"reads features.*\[1, 8, 24\]"),
    ("whisper", FEATURES.long(), "reads features"),
    ("whisper", FEATURES[:, :-1], "cannot encode this source"),
]


@pytest.mark.parametrize(("name", "source", "reason"), WRONG)
def test_wrong_sources(name: str, source: Any, reason: str) -> None:
    engine = Engine(target_of(name, check=False))
    with pytest.raises(OutpaceError, match=reason):
        engine.add([START], source=source)
    assert engine.sequences == []


def test_what_else_is_refused() -> None:
    model = SEQ2SEQ_FAMILIES["bart"].build()
    target = Target(model)
    with pytest.raises(ContextOverflow, match="65 tokens, the encoder 64 positions"):
        target.encode([4] * 65)
    with pytest.raises(OutpaceError, match="static"):
        Target(model, static=True)
    assert not Target(model, check=False).release()
    with pytest.raises(UnsupportedModel, match=r"bart.*encoder-decoder.*outpace\.Target"):
        CausalTarget(model)
    with pytest.raises(OutpaceError, match="2 prompts but 1 sources"):
        Engine(target).generate([[START]] * 2, sources=[[4]])
    with pytest.raises(OutpaceError, match="no encoder"):
        Engine(outpace.testing.ToyTarget()).add([1], source=[4])
    with pytest.raises(OutpaceError, match="open"):
        cache = target.new_cache()
        target.forward(cache, Batch.of({cache.allocate(): [START]}))
    model.train()
    with pytest.raises(OutpaceError, match=r"model\.eval"):
        target.encode([4])


def test_features_of_two_lengths_are_not_decoded_together() -> None:
    """Whisper's decoder masks no part of its source."""
    engine = Engine(target_of("whisper", check=False))
    engine.add([START], source=Source(torch.randn(12, 32).double()))
    engine.step()
    other = engine.add([START], source=Source(torch.randn(9, 32).double()))
    engine.step()
    assert other.finish_reason == "error" and "9 beside 12" in str(other.error)


def test_it_does_not_draft() -> None:
    """Refused before anything is decoded, whatever the target."""
    model = SEQ2SEQ_FAMILIES["bart"].build()
    for target in (Target(model), ToyTarget()):
        with pytest.raises(UnsupportedModel, match=r"Bart.*encoder-decoder.*give a decoder-only model"):
            Engine(target, DraftModel(model))


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_it_does_not_draft_by_its_name(name: str, tmp_path: Path) -> None:
    """transformers would load BART's decoder alone, and list the classes it has for T5."""
    SEQ2SEQ_FAMILIES[name].build().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"is an encoder-decoder model.*give a decoder-only model"):
        Engine(ToyTarget(), DraftModel(str(tmp_path)))


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("encoder_decoder", capsys)
    lines = re.findall(r"(\w+): (\d+) steps, the same tokens: True", output)
    steps = {name: int(count) for name, count in lines}
    assert set(steps) == {"none", "lookahead", "reference"}
    assert int(steps["lookahead"]) < int(steps["none"]) and int(steps["reference"]) < int(steps["none"])


# Each family in one dtype, in turns; the others are slow.
PRECISIONS = [
    pytest.param(name, dtype, marks=() if place % 3 == turn else pytest.mark.slow)
    for place, name in enumerate(SEQ2SEQ_FAMILIES)
    for turn, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
]


@pytest.mark.parametrize(("name", "dtype"), PRECISIONS)
def test_right_families_in_less_precision(name: str, dtype: torch.dtype) -> None:
    """The self-test lets them pass, and still finds that a way to place rows is missing."""
    model = SEQ2SEQ_FAMILIES[name].build(dtype)
    with pytest.MonkeyPatch.context() as patch:
        kind = type(Target(model)._positioning)  # type: ignore[attr-defined]
        for part in ("arguments", "during", "mask"):
            patch.setattr(kind, part, getattr(positions.Positioning, part))
        with pytest.raises(UnsupportedModel, match="paths"):
            Target(model)
