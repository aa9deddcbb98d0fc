"""Prediction layers of a checkpoint: exact with any weights, and drafting what transformers drafts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.generation.candidate_generator import MTPCandidateGenerator

import outpace
from mtp_folders import FAMILIES, SIZE, WEIGHTS, load, shard, write
from outpace import Engine, Target
from outpace.core import OutpaceError, SamplingParams, UnsupportedModel
from outpace.drafters.mtp import mtp_checkpoint
from outpace.drafters.mtp.mtp import Mtp
from outpace.drafters.support import continuing
from outpace.targets import TargetModel
from outpace.targets.inputs.masks import unknown_kinds
from outpace.testing import ToyTarget
from parts import in_turn, since

pytestmark = [since("5.24"), pytest.mark.filterwarnings("ignore::UserWarning")]

NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=NEW, temperature=0.7, seed=3, ignore_eos=True)
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED}
SHAPES: dict[str, dict[str, int]] = {"chains": {}, "trees": {"expand": 2, "max_nodes": 5}}
PROMPTS = [[5], [3, 9, 2, 7], [6, 1, 6, 1, 6, 1, 6, 11, 30, 12, 14, 15, 17, 19]]
CASES = [
    *((name, 1) for name in FAMILIES),
    ("glm4_moe", 3),
    ("deepseek_v3", 2),
    ("mimo_v2_flash", 2),
    ("step3p7", 2),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders by family and number of layers, each written once."""

    @cache
    def folder(name: str, layers: int, attention: float = 1.0) -> Path:
        return write(tmp_path_factory.mktemp(name), name, layers, attention=attention)

    return folder


@pytest.fixture(scope="module")
def targets(made: Callable[..., Path]) -> Callable[..., TargetModel]:
    @cache
    def target(name: str, layers: int, attention: float = 1.0) -> TargetModel:
        return Target(load(made(name, layers, attention)))

    return target


@pytest.mark.parametrize(("name", "layers", "sampling", "shape"), in_turn(CASES, product(SAMPLINGS, SHAPES)))
def test_tokens_are_those_of_plain_decoding(
    targets: Callable[..., TargetModel], name: str, layers: int, sampling: str, shape: str
) -> None:
    target, params = targets(name, layers), SAMPLINGS[sampling]
    plain = [found.tokens for found in Engine(target).generate(PROMPTS, params)]
    engine = Engine(target, Mtp(**SHAPES[shape]), adaptive=False, prefill_chunk=5)
    found = engine.generate(PROMPTS, params)
    assert [g.tokens for g in found] == plain
    assert sum(g.stats.accepted for g in found) >= 5
    # A batch that others leave and join.
    first = [engine.add(prompt, params) for prompt in PROMPTS]
    engine.step()
    engine.remove(first[0])
    late = engine.add(PROMPTS[0], params)
    while engine.sequences:
        engine.step()
    assert [one.output for one in (late, *first[1:])] == plain


def test_one_name_in_a_spec_and_inside_combined(targets: Callable[..., TargetModel]) -> None:
    target = targets("qwen3_5_text", 1)
    plain = [found.tokens for found in Engine(target).generate(PROMPTS, GREEDY)]
    for spec in ("mtp", "mtp:num_speculative_tokens=2", "combined:(suffix)+(mtp)"):
        found = Engine(target, spec, adaptive=False).generate(PROMPTS, GREEDY)
        assert [g.tokens for g in found] == plain
        assert sum(g.stats.drafted for g in found) > 0


def test_a_model_is_accelerated_by_name(made: Callable[..., Path]) -> None:
    model = load(made("glm4_moe", 1))
    ids = torch.tensor([PROMPTS[2]])
    stock = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    outpace.accelerate(model, "mtp")
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), stock)


# -- what is drafted -------------------------------------------------------------------------------------

Drafts = list[tuple[int, list[int]]]  # length of the text before a draft, and its tokens


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Drafts:
    """The drafts of ``mtp`` to come, of one sequence."""
    drafts: Drafts = []
    propose = Mtp.propose

    def noted(self: Mtp, states: Any) -> Any:
        found = propose(self, states)
        drafts.extend(
            (len(s.sequence.tokens), list(own.tokens)) for s, own in zip(states, found, strict=True)
        )
        return found

    monkeypatch.setattr(Mtp, "propose", noted)
    return drafts


def drafts_of_transformers(
    model: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Drafts]:
    """The text by ``generate(use_mtp=True)``, and its drafts."""
    drafts: Drafts = []
    candidates = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        found = candidates(self, input_ids, *args, **options)
        if (length := input_ids.shape[1]) < found[0].shape[1]:
            drafts.append((length, found[0][0, length:].tolist()))
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    count = model.config.get_text_config().num_hidden_layers
    if model.config.model_type in (
        "glm4_moe",
        "deepseek_v3",
    ):  # it knows the numbers of published sizes alone
        model._keys_to_ignore_on_load_unexpected = [
            rf"model\.layers\.{layer}\..*" for layer in range(count, count + model.config.num_mtp_layers)
        ]
    text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, use_mtp=True)
    return text[0].tolist(), drafts


@pytest.mark.parametrize(
    ("name", "layers", "prompt", "attention"),
    in_turn(
        [("glm4_moe", 1), ("glm4_moe", 3), ("deepseek_v3", 2), ("mellum", 1), ("step3p7", 1), ("step3p7", 2)],
        [(PROMPTS[2], 1.0), (PROMPTS[2], 4.0), (PROMPTS[1], 4.0)],
    ),
)
def test_drafts_and_accepted_lengths_are_those_of_transformers(
    made: Callable[..., Path],
    name: str,
    layers: int,
    prompt: list[int],
    attention: float,
    watched: Drafts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(made(name, layers, attention))
    text, theirs = drafts_of_transformers(model, prompt, monkeypatch)
    drafter = Mtp(num_speculative_tokens=layers)
    (found,) = Engine(Target(model), drafter, adaptive=False).generate([prompt], GREEDY)
    assert prompt + found.tokens == text
    # transformers drafts beyond the last token allowed.
    whole = [length for length, _ in theirs if length + layers < len(text)]
    assert len(whole) >= 5
    assert watched[: len(whole)] == theirs[: len(whole)]  # so the same number of tokens was accepted
    assert attention > 1 or found.stats.accepted >= 4


class Written:
    """Prediction layers computed from the tensors of a file, without a cache, one text at a time."""

    def __init__(self, folder: Path, target: TargetModel, layers: int) -> None:
        self._target = target
        self._state = load_file(folder / WEIGHTS)
        self._kind = type(target.model.model.layers[1])
        self._layers = [self._layer(number) for number in range(layers)]

    def _layer(self, number: int) -> Any:
        config, mimo = self._target.model.config, "mimo" in self._target.model.config.model_type
        layer = self._kind(config, 1).double().eval()
        stem = ("model." if mimo else "") + f"mtp.layers.{number}."
        names = {"pre_mlp_layernorm": "post_attention_layernorm", "attention_sink_bias": "sinks"}
        own = {}
        for name, tensor in self._state.items():
            rest = name.removeprefix(stem)
            if name.startswith(stem) and rest.split(".")[0] not in (
                "enorm",
                "hnorm",
                "eh_proj",
                "final_layernorm",
            ):
                own[re.sub("|".join(names), lambda found: names[found[0]], rest)] = tensor
        layer.load_state_dict(own)
        return layer

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight = self._state[name].double()
        weight = weight + 1 if name.startswith("mtp.") else weight
        return F.rms_norm(states, (SIZE,), weight, self._target.model.config.rms_norm_eps)

    def output(self, number: int, tokens: Tensor, given: Tensor, first: int) -> Tensor:
        """Outputs of a layer's rows, for tokens from place ``first`` on that read ``given``, [n, size]."""
        config = self._target.model.config
        if "mimo" in config.model_type:
            stem = f"model.mtp.layers.{number}."
            names = [f"{stem}{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")]
        else:
            parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            names = [f"mtp.{part}.weight" for part in parts]
        embedded = self._norm(names[0], self._target.embed(tokens).double())
        states = torch.cat([embedded, self._norm(names[1], given)], -1) @ self._state[names[2]].double().T
        count = len(tokens)
        places = torch.arange(first, first + count)
        seen = places[:, None] >= places
        sliding = config.layer_types[1] == "sliding_attention"
        if sliding:
            seen &= places[:, None] - places < config.sliding_window
        rotary = self._target.model.model.rotary_emb
        kind = ("sliding_attention",) if sliding else ()
        angles = rotary(states[None], places[None], *kind)
        mask = torch.zeros(1, 1, count, count, dtype=torch.float64).masked_fill(~seen, -1e300)
        out = self._layers[number](
            states[None], position_embeddings=angles, attention_mask=mask, position_ids=places[None]
        )
        return self._norm(names[3], (out[0] if isinstance(out, tuple) else out)[0])

    def draft(self, text: list[int], hidden: Tensor, most: int) -> list[int]:
        """A greedy draft after a text, whose places but the last have the states ``hidden``."""
        drafted: list[int] = []
        several = len(self._layers) > 1
        given = hidden
        for depth in range(most):
            tokens = torch.tensor([*text, *drafted])
            if several:  # each reads the target's states
                out = self.output(depth, tokens[depth + 1 :], hidden, depth + 1)
            else:
                out = self.output(0, tokens[1:], given, 1)
                given = torch.cat([given, out[-1:]])
            drafted.append(int(self._target.head(out[-1:].float()).argmax()))
        return drafted


@pytest.mark.parametrize(("name", "layers"), [("qwen3_5_text", 1), ("mimo_v2_flash", 2)])
def test_drafts_are_those_of_a_plain_computation(
    made: Callable[..., Path],
    targets: Callable[..., TargetModel],
    name: str,
    layers: int,
    watched: Drafts,
) -> None:
    target, prompt = targets(name, layers, 4.0), PROMPTS[2]
    written = Written(made(name, layers, 4.0), target, layers)
    (found,) = Engine(target, Mtp(num_speculative_tokens=2), adaptive=False).generate([prompt], GREEDY)
    text = prompt + found.tokens
    with torch.no_grad():
        states = target.model.model(torch.tensor([text]))[0][0].double()
        expected = [
            (length, written.draft(text[:length], states[: length - 1], len(tokens)))
            for length, tokens in watched
        ]
    assert watched == expected
    assert len(expected) > 5


def test_a_text_read_in_pieces_is_the_whole_text(
    targets: Callable[..., TargetModel], watched: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets("glm4_moe", 3, 4.0)
    Engine(target, "mtp", adaptive=False).generate([PROMPTS[2]], GREEDY)
    whole = list(watched)
    watched.clear()
    monkeypatch.setattr(continuing, "_CHUNK", 3)
    Engine(target, "mtp", adaptive=False, prefill_chunk=7).generate([PROMPTS[2]], GREEDY)
    assert watched == whole and len(whole) > 10


# -- what is refused -------------------------------------------------------------------------------------


def without(pattern: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if re.search(pattern, name)]:
            del state[name]

    return change


def quantised(state: dict[str, Tensor]) -> None:
    name = "mtp.layers.0.mlp.up_proj.weight"
    state[name] = state[name].to(torch.float8_e4m3fn)


def superfluous(state: dict[str, Tensor]) -> None:
    state["mtp.layers.0.mlp.other.weight"] = torch.zeros(3)


def narrow(state: dict[str, Tensor]) -> None:
    state["mtp.fc.weight"] = state["mtp.fc.weight"][:, 1:].contiguous()


def own_heads(state: dict[str, Tensor]) -> None:
    """Names as Step 3.7 is published."""
    for number in (2, 3):
        for old, new in (("shared_head.norm", "norm"), ("shared_head.head", "output")):
            weight = state.pop(f"model.layers.{number}.{old}.weight", state["lm_head.weight"].clone())
            state[f"model.layers.{number}.transformer.shared_head.{new}.weight"] = weight


REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "none": ("qwen3_5_text", without("^mtp"), "has no multi-token prediction layers; use a drafter"),
    "missing": ("qwen3_5_text", without(r"mtp\..*down_proj"), "mtp_block.mlp.down_proj.weight'.* is missing"),
    "superfluous": ("qwen3_5_text", superfluous, "mlp.other.weight'.* is not expected"),
    "another shape": ("qwen3_5_text", narrow, "'layers.0.eh_proj.weight'.* has another shape"),
    "quantised": ("qwen3_5_text", quantised, "is quantised, to F8_E4M3; give path"),
    "heads of their own": ("step3p7", own_heads, "heads of their own, as .*2.transformer.*; use a"),
    "another number": ("glm4_moe", without(r"layers\.3\."), "has 1 prediction layers, but .* is 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_cannot_draft_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    name, change, message = REFUSED[case]
    folder = write(tmp_path, name, 2 if name in ("glm4_moe", "step3p7") else 1, change)
    with pytest.raises(OutpaceError, match=message) as caught:
        Engine(Target(load(folder)), "mtp")
    assert str(caught.value).startswith("mtp: ")
    assert "\n" not in str(caught.value)


def test_more_places_than_layers_are_refused(targets: Callable[..., TargetModel]) -> None:
    with pytest.raises(OutpaceError, match="at most 2, the number of"):
        Engine(targets("deepseek_v3", 2), "mtp:num_speculative_tokens=3")


def test_a_target_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutpaceError, match="no decoder-only transformers model"):
        Engine(ToyTarget(), "mtp")
    model = load(write(tmp_path, "qwen3_5_text"))
    model.config._name_or_path = model.name_or_path = ""
    with pytest.raises(OutpaceError, match="not loaded from a folder; give path"):
        Engine(Target(model), "mtp")
    with pytest.raises(OutpaceError, match=r"no folder nowhere/at-all, .*\); .*or fetch one, with a network"):
        Engine(Target(model), Mtp(path="nowhere/at-all"))
    assert Engine(Target(model), Mtp(path=str(tmp_path))).generate([[5, 6]], GREEDY)


def test_layers_with_a_state_are_refused(
    targets: Callable[..., TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = mtp_checkpoint.layouts
    monkeypatch.setattr(
        mtp_checkpoint,
        "layouts",
        lambda layers: [
            mtp_checkpoint.PredictionLayout(one.pattern, kind="hybrid") for one in layouts(layers)
        ],
    )
    with pytest.raises(UnsupportedModel, match="keeps a state beside keys and values"):
        Engine(targets("qwen3_5_text", 1), "mtp")


def test_the_layers_of_inkling_have_a_state() -> None:
    config = AutoConfig.for_model("inkling_text", num_mtp_layers=2)
    found = mtp_checkpoint._config(config, mtp_checkpoint.layouts(config.num_hidden_layers)[2], 2)
    assert unknown_kinds(found) == ["hybrid"]


def test_an_older_transformers_is_refused(
    targets: Callable[..., TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("transformers.modeling_layers.MtpModel")
    with pytest.raises(OutpaceError, match=r"needs transformers 5\.24 or later"):
        Engine(targets("qwen3_5_text", 1), "mtp")


# -- files -----------------------------------------------------------------------------------------------


def test_only_the_layers_own_tensors_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shards, too; and nothing of the user's model changes."""
    folder = write(tmp_path, "qwen3_5_text")
    whole = Engine(Target(load(folder)), "mtp", adaptive=False).generate(PROMPTS, GREEDY)
    shard(folder)
    model = load(folder)
    before = {name: id(part) for name, part in [*model.named_modules(), *model.named_parameters()]}
    told = model.config.to_dict()
    target = Target(model)
    files: list[str] = []
    from transformers import modeling_layers

    opened = modeling_layers.safe_open

    def noted(file: Any, *args: Any, **options: Any) -> Any:
        files.append(Path(file).name)
        return opened(file, *args, **options)

    monkeypatch.setattr(modeling_layers, "safe_open", noted)
    found = Engine(target, "mtp", adaptive=False).generate(PROMPTS, GREEDY)
    assert files == ["model-2.safetensors"]
    assert [g.tokens for g in found] == [g.tokens for g in whole]
    assert [g.stats.accepted for g in found] == [g.stats.accepted for g in whole]
    assert {name: id(part) for name, part in [*model.named_modules(), *model.named_parameters()]} == before
    assert model.config.to_dict() == told


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_follow_the_targets_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    target = Target(load(write(tmp_path, "mimo_v2_flash", 2)).to(dtype))
    plain = Engine(target).generate(PROMPTS, GREEDY)
    found = Engine(target, "mtp", adaptive=False).generate(PROMPTS, GREEDY)
    if dtype == torch.float64 or target.bit_exact:
        assert [g.tokens for g in found] == [g.tokens for g in plain]
    assert sum(g.stats.accepted for g in found) > 0
