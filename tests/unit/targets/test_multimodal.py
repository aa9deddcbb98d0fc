"""Models of text and images: refusals, and the test at the first image."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import transformers

import outpace
from outpace import Engine, SamplingParams, Target
from outpace.core import OutpaceError, PromptStates, UnsupportedModel
from outpace.targets import MultimodalTarget
from outpace.targets.stock import multimodal
from zoo.family import randomise
from zoo.image_families import IMAGE, IMAGE_FAMILIES, build, prompts

FEW = SamplingParams(max_new_tokens=3)


@cache
def target() -> MultimodalTarget:
    found = Target(build("llava"), check=False)
    assert isinstance(found, MultimodalTarget)
    return found


def one(name: str = "llava", more: int = 0) -> dict[str, Any]:
    return prompts(name, (1,), more=more)


def ids(given: dict[str, Any]) -> list[int]:
    tokens: list[int] = given["input_ids"][0].tolist()
    return tokens


SOURCES: dict[str, tuple[Any, str]] = {
    "tokens": ([1, 2, 3], "what the processor returns for one prompt"),
    "no ids": ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "a mapping with input_ids"),
    "a batch": (prompts("llava", (1, 1)), r"input_ids \[1, length\]"),
    "pads": ({**one(), "attention_mask": torch.tensor([[0] + [1] * 8])}, "one prompt without pads"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources(name: str) -> None:
    source, remedy = SOURCES[name]
    with pytest.raises(OutpaceError, match=remedy):
        Engine(target()).add(ids(one()), FEW, source=source)


def test_another_prompt_than_the_sources() -> None:
    with pytest.raises(OutpaceError, match="give the source's own input_ids as the prompt"):
        Engine(target()).add(ids(one())[:-1], FEW, source=one())


def test_a_source_may_be_encoded_once_and_shared() -> None:
    encoded = target().encode(one())
    assert isinstance(encoded, PromptStates) and target().encode(encoded) is encoded
    engine = Engine(target(), "lookahead", adaptive=False)
    found = engine.generate([ids(one())] * 2, FEW, sources=[encoded, one()])
    assert found[0].tokens == found[1].tokens


def test_a_model_in_training_mode() -> None:
    model = build("llava")
    own = Target(model, check=False)
    model.train()
    with pytest.raises(OutpaceError, match=r"model\.eval"):
        own.encode(one())


def test_its_weights_are_not_released() -> None:
    model = build("llava")
    own = Target(model.to(torch.bfloat16), exact=True)
    assert isinstance(own, MultimodalTarget) and own.plan.packed
    assert not own.release() and not own.released
    assert not any(weight.is_meta for weight in model.parameters())


def test_fixed_shapes_take_text_alone() -> None:
    engine = Engine(Target(build("llava"), static=True, check=False), length=64)
    assert len(engine.generate([[1, 2, 3]], FEW)[0].tokens) == 3
    with pytest.raises(OutpaceError, match="make the target without static=True"):
        engine.generate([ids(one())], FEW, sources=[one()])


def small(prefix: str, **options: Any) -> Any:
    """A random model whose language model reads more of an image than embeddings and positions."""
    config = getattr(transformers, f"{prefix}Config")(**options)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).double().eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    randomise(model, 0)
    return model


def gemma3() -> Any:
    """The rows of its images see each other, later ones too."""
    options = IMAGE_FAMILIES["llava"][1]
    vision = {**options["vision_config"], "model_type": "siglip_vision_model"}
    text = {name: value for name, value in options["text_config"].items() if name != "model_type"}
    return small(
        "Gemma3",
        vision_config=vision,
        text_config={**text, "head_dim": 8},
        image_token_index=IMAGE,
        mm_tokens_per_image=4,
    )


def test_images_that_enter_several_layers() -> None:
    model = build("qwen3_vl")
    for images in ((1, 2), (0, 0)):
        given = {**prompts("qwen3_vl", images), "max_new_tokens": 9, "repetition_penalty": 3.0}
        expected = type(model).generate(model, **given)
        outpace.accelerate(model, "lookahead", adaptive=False)
        assert model.generate(**given).tolist() == expected.tolist()
        outpace.restore(model)


def test_what_enters_several_layers_and_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Target(build("qwen3_vl"), check=False)
    with monkeypatch.context() as patched:
        patched.setattr(MultimodalTarget, "_adding", lambda *_: nullcontext())
        with pytest.raises(UnsupportedModel, match="other logits for a prompt with images"):
            own.encode(one("qwen3_vl"))
    monkeypatch.setattr(multimodal, "_ADDED", "another name")
    with pytest.raises(UnsupportedModel, match="deepstack_visual_embeds besides embeddings"):
        own.encode(one("qwen3_vl"))


def test_images_whose_rows_see_each_other() -> None:
    model = gemma3()
    given = one() | {"token_type_ids": (one()["input_ids"] == IMAGE).long()}
    with pytest.raises(UnsupportedModel, match="a mask of its own"):
        Engine(Target(model)).add(ids(given), FEW, source=given)
    outpace.accelerate(model, "none")
    with pytest.raises(OutpaceError, match="input_ids, attention_mask and images only"):
        model.generate(**given, max_new_tokens=3)


def test_the_first_image_tests_the_model() -> None:
    """A model that reads its images elsewhere as well gives other logits."""

    def look_again(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("pixel_values") is not None:
            output.logits = output.logits.flip(-1)

    model = build("llava")
    model.register_forward_hook(look_again, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="other logits for a prompt with images"):
        Target(model, check=False).encode(one())
