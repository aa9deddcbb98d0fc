"""Odd files: a model, a drafter or a profile loads or is refused, at once and in one line.

The sweeps draw odd values for every entry of a config, an index, a header and a table. The small ones end
where the files are checked; the large ones (marker ``slow``) load, and decode with what loads.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from folders import CONTEXT, byte_tokenizer, save_llama
from limits import linux, within_limits
from models import tiny_llama
from outpace import reading
from outpace.core import ContextOverflow, OutpaceError, SamplingParams
from outpace.drafters import load_drafter
from outpace.drafters.blocks.dflash_module import DFlashConfig, DFlashModule
from outpace.drafters.eagle.eagle_module import EagleConfig, EagleModule
from outpace.drafters.heads.hydra import HydraConfig, HydraHeads
from outpace.drafters.heads.medusa import MedusaConfig, MedusaHeads
from outpace.engine.engine import Engine
from outpace.engine.profile import key_of, load_profile
from outpace.files import read_json
from outpace.loading import load
from outpace.targets import Target, TargetModel
from outpace.targets.llamacpp.header import check_header
from outpace.targets.weights.checkpoint import read_config
from outpace.targets.weights.pretrained import load_model

pytestmark = linux

HUGE = 10**9
VALUES: list[Any] = [
    HUGE, 10**30, 2**63, -1, 0, 1, 1.5, float("inf"), float("nan"), True, None, "x", "", "../..",
    "/etc/passwd", [], {}, [HUGE], [[None]], [1] * 9, {"a": HUGE}, {"a": {"a": None}}, "a" * 9999,
]  # fmt: skip
BROKEN = [
    b"",
    b"[]",
    b"5",
    b"null",
    b'"x"',
    b"{}",
    b"[" * 99_999,
    b'{"a":' * 30_000,
    b"\xff\xfe",
    b"1" * 5000,
]
sweep = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(work: Callable[[], Any]) -> None:
    """It is done, or refused in one line, within the limits; anything else is an error of the test."""
    try:
        within_limits(work)
    except OutpaceError as error:
        assert len(str(error).splitlines()) == 1, str(error)


def entries(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all entries of nested mappings."""
    for name, entry in value.items():
        yield (name,)
        if isinstance(entry, dict):
            yield from ((name, *path) for path in entries(entry))


@st.composite
def odd(draw: st.DrawFn, value: Any, more: tuple[str, ...] = ()) -> Any:
    """A mapping with one or two entries of another value."""
    made = copy.deepcopy(value)
    paths = [*entries(value), *((name,) for name in more)]
    for path in draw(st.lists(st.sampled_from(paths), min_size=1, max_size=2)):
        place = made
        for name in path[:-1]:
            place = place[name] if isinstance(place, dict) and isinstance(place.get(name), dict) else made
        place[path[-1]] = draw(st.sampled_from(VALUES))
    return made


def in_file(text: Any) -> bytes:
    return text if isinstance(text, bytes) else json.dumps(text).encode()


# -- models ----------------------------------------------------------------------------------------------

# Entries that the config of a Llama need not have.
MORE = (
    "num_layers", "n_layer", "num_labels", "num_experts", "sliding_window", "layer_types", "rope_scaling",
    "quantization_config", "text_config", "auto_map", "tie_word_embeddings", "output_hidden_states",
    "is_encoder_decoder", "pruned_heads", "id2label",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_llama(tmp_path_factory.mktemp("models") / "tiny")
    read_config(str(folder))  # transformers' imports are no work of a file
    return folder


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


@lru_cache(maxsize=1)
def target() -> TargetModel:
    return Target(tiny_llama(layers=4))


def shard(folder: Path, index: Any) -> None:
    """Name the weights as a shard, beside this index."""
    weights = folder / "model.safetensors"
    if weights.exists():
        weights.rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(in_file(index))


def recast(folder: Path, name: str, dtype: torch.dtype) -> None:
    """Write a tensor of the weights in another dtype."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors", {"format": "pt"})


def edit(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def in_shards(folder: Path, **more: Any) -> None:
    """Weights as a shard beside an index of all tensors."""
    names = load_file(folder / "model.safetensors")
    shard(folder, {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"), **more})


Q = "model.layers.0.self_attn.q_proj.weight"
FAULTS: list[tuple[Callable[[Path], None], str]] = [
    (
        partial(edit, num_hidden_layers=HUGE),
        r"num_hidden_layers is 1000000000, and its weights have 12 tensors",
    ),
    (partial(edit, num_hidden_layers=65), "num_hidden_layers is 65, and"),
    (partial(edit, num_hidden_layers=0), "num_hidden_layers is 0; a model has at least one"),
    (partial(edit, num_hidden_layers=-1), "num_hidden_layers is -1; a model has at least one"),
    (partial(edit, text_config={"n_layer": HUGE}), "n_layer is 1000000000"),
    (partial(edit, num_labels=10**30), "num_labels is a number of more than 15 digits; at most 4096"),
    (partial(edit, num_local_experts=HUGE), "num_local_experts is 1000000000; at most 4096"),
    (
        partial(shard, index={"metadata": {}, "weight_map": {Q: "../.."}}),
        r"names '\.\./\.\.' for .*same folder",
    ),
    (partial(shard, index={"metadata": {}, "weight_map": {Q: "/etc/passwd"}}), "names '/etc/passwd' for"),
    (partial(shard, index={"weight_map": {Q: "../copy/model.safetensors"}}), "same folder"),
    (partial(shard, index={"weight_map": {Q: "a.safetensors"}}), r"names a\.safetensors, which is missing"),
    (partial(shard, index={"weight_map": {Q: None}}), "names 'None'"),
    (partial(shard, index={"weight_map": []}), "is not an index: it has no weight_map"),
    (partial(shard, index=[]), "is not an index"),
    (partial(edit, model_type=[]), r"model_type is \[\]; it should be the name of a family"),
    (partial(in_shards), "has no metadata, which transformers reads; add"),
    (partial(in_shards, metadata=[]), "has no metadata"),
    (partial(shard, index=b"[" * 99_999), "nested too deep"),
    (partial(recast, name=Q, dtype=torch.int16), "q_proj.weight' is of I16, and config.json names no"),
    (partial(recast, name=Q, dtype=torch.float8_e4m3fn), "is of F8_E4M3, and"),
]


@pytest.mark.parametrize(("spoil", "reason"), FAULTS)
def test_models_and_draft_models_are_refused_before_a_module_is_made(
    spoil: Callable[[Path], None], reason: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)  # nothing is made before the checks
    for read in (lambda: load(str(folder)), lambda: load_model(str(folder), target())):
        with pytest.raises(OutpaceError, match=reason):
            within_limits(read)


@pytest.mark.parametrize("entry", [{"sliding_window": "x"}, {"output_hidden_states": [[None]]}])
def test_a_config_that_fails_at_the_first_token_is_a_refusal(entry: dict[str, Any], folder: Path) -> None:
    edit(folder, **entry)
    for read in (lambda: load(str(folder)), lambda: load_model(str(folder), target())):
        with pytest.raises(OutpaceError, match=r"cannot run on a single token|cannot make a cache"):
            read()


@pytest.mark.parametrize("vocabulary", [65, 10**12])
def test_a_config_of_other_shapes_than_the_weights(vocabulary: int, folder: Path) -> None:
    """transformers refers to a report that nobody is shown."""
    edit(folder, vocab_size=vocabulary)
    for read in (lambda: load(str(folder)), lambda: load_model(str(folder), target())):
        with pytest.raises(OutpaceError, match="other shapes than its config describes; give the config"):
            read()


@pytest.mark.parametrize("file", ["generation_config.json", "config.json", "tokenizer.json"])
def test_files_that_are_no_mappings(file: str, folder: Path) -> None:
    (folder / file).write_bytes(b"5")
    survives(lambda: load_model(str(folder), target()))


def test_a_broken_header_is_named_of_a_draft_model_too(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes((1 << 62).to_bytes(8, "little") + weights.read_bytes()[8:])
    with pytest.raises(
        OutpaceError, match=r"draft_model: .*model\.safetensors cannot be read: .*header too large"
    ):
        load_model(str(folder), target())


def models(data: st.DataObject, model: Path, read: Callable[[Path], Any], tmp_path: Path) -> None:
    """Spoil a config, an index or a header, and read the folder."""
    folder = tmp_path / "copy"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    names = list(load_file(model / "model.safetensors"))
    what = data.draw(st.sampled_from(["config", "index", "header", "broken"]))
    if what == "config":
        (folder / "config.json").write_bytes(
            in_file(data.draw(odd(json.loads((model / "config.json").read_text()), MORE)))
        )
    elif what == "index":
        places = dict.fromkeys(names, "model-00001-of-00001.safetensors")
        shard(folder, data.draw(odd({"metadata": {"total_size": 1}, "weight_map": places})))
    elif what == "header":
        raw = (model / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        head = in_file(data.draw(odd(json.loads(raw[8 : 8 + size]))))
        (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + size :])
    else:
        file = data.draw(
            st.sampled_from(
                [
                    "config.json",
                    "model.safetensors",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "generation_config.json",
                ]
            )
        )
        (folder / file).write_bytes(data.draw(st.sampled_from(BROKEN)))
    survives(lambda: read(folder))


def config_of(folder: Path) -> None:
    """Read a config as ``load`` does, with transformers' own refusals."""
    try:
        read_config(str(folder))
    except OutpaceError:
        raise
    except Exception as error:
        raise OutpaceError(type(error).__name__) from error


@sweep(max_examples=60)
@given(data=st.data())
def test_a_sweep_of_models(data: st.DataObject, model: Path, tmp_path: Path) -> None:
    models(data, model, config_of, tmp_path)


@pytest.mark.slow
@sweep(max_examples=300)
@given(data=st.data())
def test_a_large_sweep_of_models(data: st.DataObject, model: Path, tmp_path: Path) -> None:
    read = data.draw(st.sampled_from([lambda at: load(str(at)), lambda at: load_model(str(at), target())]))
    models(data, model, read, tmp_path)


# -- drafters --------------------------------------------------------------------------------------------

DRAFTERS: dict[type[Any], Any] = {
    EagleModule: EagleConfig(draft_vocabulary=40),
    MedusaHeads: MedusaConfig(draft_vocabulary=40),
    HydraHeads: HydraConfig(own_residual=True),
    DFlashModule: DFlashConfig(draft_vocabulary=40),
}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    for kind, config in DRAFTERS.items():
        kind.new(config, target()).save(folder / kind.method)
        file = folder / kind.method / "config.json"  # without the digest, which refuses all changes alike
        described = json.loads(file.read_text())
        del described["digest"]
        file.write_text(json.dumps({**described, "format": 1}))
    return folder


def respoil(file: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor of a file."""
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    save_file({**tensors, name: change(tensors[name])}, file)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_weights_that_are_not_floats_are_refused(kind: type[Any], drafters: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(drafters / kind.method, tmp_path / "copy"))
    first = next(
        name for name, one in load_file(folder / "model.safetensors").items() if one.is_floating_point()
    )
    respoil(folder / "model.safetensors", first, lambda tensor: tensor.to(torch.int16))
    with pytest.raises(OutpaceError, match=rf"tensor '{first}' is of torch\.int16, in place of floats"):
        kind.load(folder, target())


@pytest.mark.parametrize("kind", [EagleModule, MedusaHeads, DFlashModule])
@pytest.mark.parametrize("value", [HUGE, -5])
def test_drafted_ids_beyond_the_vocabulary_are_refused(
    kind: type[Any], value: int, drafters: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(drafters / kind.method, tmp_path / "copy"))
    name = "d2t" if kind is EagleModule else "drafted.ids"
    place = -1 if value > 0 else 0  # so that they still ascend
    respoil(folder / "model.safetensors", name, lambda ids: ids.index_fill(0, torch.tensor(place), value))
    with pytest.raises(OutpaceError, match=rf"tensor '{name}' (maps to ids|must ascend)"):
        kind.load(folder, target())


COUNTS = [
    (EagleModule, "depth", HUGE, "describes a larger module: there are only"),
    (MedusaHeads, "heads", HUGE, "describes a larger module"),
    (HydraHeads, "layers", HUGE, "describes a larger module"),
    (DFlashModule, "depth", HUGE, "describes a larger module"),
    (DFlashModule, "intermediate_size", HUGE, r"should have \[1000000000, 32\]"),
    (DFlashModule, "tokens", 1.5, "tokens is 1.5"),
    (EagleModule, "steps", None, "steps is None"),
]


@pytest.mark.parametrize(("kind", "entry", "value", "reason"), COUNTS)
def test_a_drafter_larger_than_its_weights_is_not_made(
    kind: type[Any], entry: str, value: Any, reason: str, drafters: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(drafters / kind.method, tmp_path / "copy"))
    described = json.loads((folder / "config.json").read_text())
    described["config"][entry] = value
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(OutpaceError, match=reason):
        within_limits(lambda: kind.load(folder, target()))


def test_published_configs_count_no_more_than_others(drafters: Path, tmp_path: Path) -> None:
    layer = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": HUGE, "vocab_size": 97}
    for method, kind, more in [
        ("eagle", EagleModule, {"draft_vocab_size": 40}),
        ("dflash", DFlashModule, {"block_size": 4}),
    ]:
        folder = Path(shutil.copytree(drafters / method, tmp_path / method))
        (folder / "config.json").write_text(json.dumps(layer | more))
        with pytest.raises(OutpaceError, match="num_hidden_layers is 1000000000"):
            within_limits(lambda kind=kind, folder=folder: kind.load(folder, target()))


def spoilt_drafter(data: st.DataObject, drafters: Path, folder: Path) -> type[Any]:
    """A drafter's folder with another config or another tensor."""
    kind: type[Any] = data.draw(st.sampled_from(list(DRAFTERS)))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(drafters / kind.method, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    what = data.draw(st.sampled_from(["config", "config", "tensor", "broken"]))
    if what == "config":
        config.write_bytes(in_file(data.draw(odd(json.loads(config.read_text())))))
    elif what == "tensor":
        dtypes = [torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float16]
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
            *(partial(torch.Tensor.to, dtype=dtype) for dtype in dtypes),
            lambda tensor: tensor.flatten(),
            lambda tensor: torch.full_like(tensor, HUGE),
            lambda tensor: torch.full_like(tensor, -5),
        ]
        respoil(
            weights, data.draw(st.sampled_from(list(load_file(weights)))), data.draw(st.sampled_from(changes))
        )
    else:
        data.draw(st.sampled_from([config, weights])).write_bytes(data.draw(st.sampled_from(BROKEN)))
    return kind


@sweep(max_examples=50)
@given(data=st.data())
def test_a_sweep_of_drafters(data: st.DataObject, drafters: Path, tmp_path: Path) -> None:
    kind = spoilt_drafter(data, drafters, tmp_path / "copy")
    survives(lambda: kind.load(tmp_path / "copy", target()))


@pytest.mark.slow
@sweep(max_examples=600)
@given(data=st.data())
def test_a_large_sweep_of_drafters(data: st.DataObject, drafters: Path, tmp_path: Path) -> None:
    kind = spoilt_drafter(data, drafters, tmp_path / "copy")

    def decode() -> None:
        spec = f"{kind.method}:path={tmp_path / 'copy'}"
        engine = Engine(target(), load_drafter(spec), adaptive=False)
        engine.generate([[3, 9, 2, 7]], SamplingParams(max_new_tokens=6, ignore_eos=True))

    survives(decode)


# -- profiles --------------------------------------------------------------------------------------------

FIELDS = {
    "drafter": '"lookahead"', "objective": '"throughput"', "batch": "1", "tokens_per_second": "1.0",
    "speedup": "1.0", "mean_accepted_length": "1.0", "prompts": "3", "suite": '"builtin"', "outpace": '"1"',
}  # fmt: skip
TOML = [
    "1000000000", "-1", "1e400", "nan", "true", "[]", "{}", "[[1]]", "{a={a=1}}", "1979-01-01", '"x"', '""',
    '"lookahead:window=1000000000000"', '"' + "combined:(" * 900 + '"', "[" * 9000, "{a=" * 3000, "a = 1",
]  # fmt: skip
TOML_FILES = ["", "[[[", "a." * 5000 + "b=1", "a=1\n" * 3, "\n".join(f"a{i}=1" for i in range(99_999))]


@sweep(max_examples=50)
@given(data=st.data())
def test_a_sweep_of_profiles(data: st.DataObject, tmp_path: Path) -> None:
    fields = FIELDS | data.draw(
        st.dictionaries(st.sampled_from([*FIELDS, "costs"]), st.sampled_from(TOML), max_size=2)
    )
    lines = [f"{name} = {value}" for name, value in fields.items()]
    head = ['format = "outpace-profile"', "version = 2", f"[profiles.{json.dumps(key_of(target()))}]"]
    text = data.draw(st.sampled_from(["\n".join(head + lines)] * 4 + TOML_FILES))
    (tmp_path / "odd.toml").write_text(text)
    survives(lambda: load_profile(tmp_path / "odd.toml", target()))


# -- prompts and others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["the cat ", " "])
@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_far_too_long_is_refused_at_its_beginning(text: str, chat: bool, model: Path) -> None:
    loaded = load(str(model))
    read: list[int] = []

    class Counting:
        chat_template = "{{ messages[0]['content'] }}"
        apply_chat_template = staticmethod(lambda messages, **options: messages[0]["content"])

        def __call__(self, part: str, **options: Any) -> Any:
            read.append(len(part))
            return loaded.tokenizer(part, **options)

    counted = replace(loaded, tokenizer=Counting())
    with pytest.raises(ContextOverflow, match=r"the prompt has 20000000 characters, .* shorten the prompt"):
        within_limits(lambda: counted.encode((text * 20_000_000)[:20_000_000], chat))
    assert sum(read) < 10 * CONTEXT


def test_a_long_prompt_of_few_tokens_is_tokenised_to_its_end() -> None:
    """Many tokenizers write a run of spaces as one token, or none."""
    tokenizer = byte_tokenizer()

    def words(text: str, **options: Any) -> Any:
        return tokenizer(" ".join(text.split()), **options)

    assert reading.token_ids(words, "a" + " " * 99_999 + "b", most=8) == tokenizer("a b").input_ids


def test_json_is_not_read_beyond_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"[")
    os.truncate(file, 1 << 30)  # which takes no place on the disk
    with pytest.raises(OutpaceError, match="is larger than"):
        within_limits(lambda: read_json(file))


def gguf(*values: tuple[bytes, int, bytes]) -> bytes:
    """A header of keys, types and values."""
    pairs = b"".join(
        struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value for key, kind, value in values
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + pairs


TEXTS = struct.pack("<IQ", 8, 2) + (struct.pack("<Q", 3) + b"abc") * 2  # an array of strings


@pytest.mark.parametrize("layers", [0, 1, 512, 513, HUGE])
def test_layers_for_which_llama_cpp_would_end_the_process(layers: int, tmp_path: Path) -> None:
    file = tmp_path / "odd.gguf"
    file.write_bytes(gguf((b"tokens", 9, TEXTS), (b"llama.block_count", 4, struct.pack("<I", layers))))
    if not 1 <= layers <= 512:
        with pytest.raises(OutpaceError, match=f"its block_count is {layers}, and llama.cpp takes 1 to 512"):
            check_header(file)
    else:
        check_header(file)


LONG = struct.pack("<Q", 2**63)
TYPES = {"strings": 8, "numbers": 10, "arrays": 9, "of another type": 99}
BROKEN_GGUF = {
    **{name: gguf((b"a", 9, struct.pack("<I", kind) + LONG)) for name, kind in TYPES.items()},
    "a string": gguf((b"a", 8, LONG)),
    "another type": gguf((b"a", 99, LONG)),
    "a key": gguf()[:16] + struct.pack("<Q", 1) + LONG,
    "pairs": gguf()[:16] + LONG,
    "a number cut off": gguf((b"a.block_count", 4, b"\0")),
    "another magic": b"FUGG" + gguf()[4:],
    "nothing": b"",
}


@pytest.mark.parametrize("raw", BROKEN_GGUF.values(), ids=BROKEN_GGUF)
def test_a_header_that_is_none_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "odd.gguf").write_bytes(raw)
    with pytest.raises(OutpaceError, match=r"odd\.gguf is truncated or damaged; fetch it again \("):
        within_limits(lambda: check_header(tmp_path / "odd.gguf"))


WHOLE = gguf(
    (b"general.alignment", 4, struct.pack("<I", 32)),
    (b"llama.block_count", 4, struct.pack("<I", 2)),
    (b"tokenizer.ggml.tokens", 9, TEXTS),
    (b"tokenizer.ggml.scores", 9, struct.pack("<IQ2f", 6, 2, 0, 1)),
)
TENSOR = struct.pack("<Q", 8) + b"a.weight" + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_spoilt_header_is_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Numbers that are too large, bits that flipped, parts that are missing: never another error."""
    rng, file = random.Random(seed), tmp_path / "odd.gguf"
    header = WHOLE[:8] + struct.pack("<Q", 1) + WHOLE[16:] + TENSOR
    whole = header + bytes(-len(header) % 32) + bytes(32)
    file.write_bytes(whole)
    check_header(file)
    for _ in range(40):
        data, start = bytearray(whole), rng.randrange(4, len(header) - 8)
        form, end = rng.randrange(4), rng.randrange(len(data))
        if form == 0:
            data[start : start + 8] = struct.pack("<Q", rng.choice([0, 1, 2**32, 2**61, 2**63, 2**64 - 1]))
        elif form == 1:
            data[start : start + 4] = struct.pack("<I", rng.choice([0, 1, 8, 9, 99, 2**31, 2**32 - 1]))
        elif form == 2:
            del data[min(start, end) : max(start, end)]
        else:
            for _ in range(rng.choice([1, 8])):
                data[rng.randrange(len(header))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        with suppress(OutpaceError):
            check_header(file)
