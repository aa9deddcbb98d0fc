"""Functions in C that a wheel carries: which are chosen, what is not loaded, and their bits."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.core import OutpaceError, SamplingParams
from outpace.draws import many_rows
from outpace.embedded import cache_path
from outpace.native import build, draw, layers, move, packaged, pool
from outpace.native.instructions import LIMITS, NATIVE, VARIABLE, instructions
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from outpace.targets.cpu.kernels import Int4, Int8

HERE = cache_path()
GCC = shutil.which(os.environ.get("CC", "gcc"))
MACHINE, FOUND = platform.machine(), instructions()
NAMES = [name for name, one in LIMITS.items() if one in packaged.SETS.get(MACHINE, ()) if one.needs <= FOUND]
X86 = packaged.SETS["x86_64"]
MODULES: dict[Any, tuple[Any, ...]] = {draw: (), move: (), layers: (torch.float32, torch.bfloat16)}
compiles = pytest.mark.skipif(
    sys.platform != "linux" or MACHINE not in packaged.SETS or GCC is None,
    reason="no gcc, or no sets for this machine",
)


def test_the_best_set_that_the_processor_has_is_chosen() -> None:
    every = X86[0].needs
    assert packaged.fitting("x86_64", every, None) is LIMITS["amx"]
    assert packaged.fitting("x86_64", every - {"amx_bf16"}, None) is LIMITS["avx512-bf16"]
    assert packaged.fitting("x86_64", every - {"avx512_bf16"}, None) is LIMITS["avx512"]
    assert packaged.fitting("x86_64", every - {"avx512f"}, None) is LIMITS["avx2"]
    assert packaged.fitting("x86_64", every - {"abm"}, None) is None
    assert packaged.fitting("x86_64", every, LIMITS["avx2"]) is LIMITS["avx2"]
    assert packaged.fitting("x86_64", every, LIMITS["x86-64"]) is None
    assert packaged.fitting("riscv64", every, None) is None
    arm = packaged.fitting("aarch64", (), None)
    assert arm is not None and arm.march == "armv8-a"


def test_a_name_depends_on_source_set_and_flags(tmp_path: Path) -> None:
    source = tmp_path / "seven.c"
    source.write_text("int seven(void) { return 7; }\n")
    names = {
        packaged.name_of(source, march, flags) for march in ("haswell", "armv8-a") for flags in ((), ("-DA",))
    }
    source.write_text("int seven(void) { return 8; }\n")
    assert len({*names, packaged.name_of(source, "haswell", ())}) == 5
    source.write_text('#include "eight.h"\n')
    (tmp_path / "eight.h").write_text('#include "nine.h"\n')
    for text in ("", '#include "eight.h"\n'):
        (tmp_path / "nine.h").write_text(text)
        names.add(packaged.name_of(source, "haswell", ()))
    assert len(names) == 6


@compiles
def test_every_form_that_the_modules_ask_for_is_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(build, "_carried", lambda source, flags, _: asked.append((source.name, tuple(flags))))
    monkeypatch.setattr(build, "_made", lambda *_: "not now")
    for module, arguments in MODULES.items():
        for argument in arguments or (None,):
            module.functions.__wrapped__(*[argument] * bool(arguments))
    pool.pool.__wrapped__()
    assert sorted(asked) == sorted(packaged.FORMS)
    sources = {packaged.FOLDER / name for name, _ in packaged.FORMS}
    assert set(packaged.FOLDER.glob("*.c")) == sources
    included = {file for source in sources for file in packaged.files_of(source)} - sources
    assert set(packaged.FOLDER.glob("*.h")) == included


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of libraries as a wheel has it, of this processor's set alone; not those that take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packaged, "SETS", {MACHINE: (packaged.fitting(MACHINE, FOUND, None),)})
        patch.setattr(packaged, "FORMS", [form for form in packaged.FORMS if form[0] != "layers.c"])
        return libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of every set."""
    return libraries(tmp_path_factory.mktemp("libraries"))


def libraries(folder: Path) -> Path:
    """Make the libraries of the sets that there are."""
    assert GCC is not None
    paths = list(packaged.make_libraries(folder, GCC))
    assert len(paths) == len(packaged.FORMS) * len(packaged.SETS[MACHINE])
    assert sorted(paths) == sorted(folder.iterdir())
    return folder


@pytest.fixture
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder; functions are looked for anew, and so they are after the test."""
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    cached = [*(module.functions for module in MODULES), build._warned, build._compiler, build._temporary]
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def logits(dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits of two texts, and of a tree after one of them, by compiled layers."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=112, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    target = CausalTarget(model, plan="native", exact=True)
    assert target.plan.native
    cache, found = target.new_cache(slots=2, length=128), []
    slots = [cache.allocate(), cache.allocate()]
    feeds = {
        slot: Rows(torch.randint(1, 97, (count,)).tolist())
        for slot, count in zip(slots, (70, 39), strict=True)
    }
    for _ in range(2):
        rows = target.forward(cache, Batch.of(feeds))
        found += [rows.logits_of(slot).clone() for slot in feeds]
        cache.keep({slot: range(len(own.tokens)) for slot, own in feeds.items()})
        feeds = {slots[0]: Rows([3, 5, 7, 9, 11], (-1, 0, 0, 1, 2))}
    return found


def results() -> list[Any]:
    """What functions of each file return for random data."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 4096, generator=generator) * 4
    params = [SamplingParams(temperature=0.8, top_p=0.9, top_k=50 * (row % 2)) for row in range(9)]
    found: list[Any] = [many_rows.sample(rows, params, [row * 0x1234567 for row in range(9)])]
    buffer = torch.randn(2, 3, 4, 20, 33, generator=generator)
    where = [torch.tensor(own) for own in ([0, 2], [5, 19], [1, 2])]
    strides = [stride * 4 for stride in buffer.stride()[:4]]
    library: Any = move.functions()
    library.move_rows(buffer.data_ptr(), 2, 4, *strides, 2, *(own.data_ptr() for own in where))
    found += [buffer, *layers.best(rows, 7), *layers.best(rows.bfloat16(), 7)]
    weight, bias = (torch.randn(size, 160, generator=generator).bfloat16() for size in (66, 1))
    given = torch.randn(13, 160, generator=generator).bfloat16()
    for kernel in (Int8(), Int4()):
        found += [kernel.multiply(given, kernel.pack(weight), bias[0, :66].contiguous())]
    return found + logits(torch.float32) + logits(torch.bfloat16)


@pytest.mark.slow
@compiles
@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(not NAMES, reason="no set fits this processor")
def test_packaged_functions_return_the_bits_of_those_compiled_here(
    every: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those compiled here are the process's own, which other tests have compiled already."""
    check_bits(NATIVE, every, HERE, monkeypatch)


@pytest.mark.slow
@compiles
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("name", NAMES)
def test_those_of_every_set_return_the_bits_of_those_compiled_here(
    name: str, every: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_bits(name, every, tmp_path / "cache", monkeypatch)


def check_bits(name: str, carried: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what packaged functions return with what those do that are compiled for these instructions."""
    monkeypatch.setenv(VARIABLE, name)
    monkeypatch.setenv("OUTPACE_CACHE", str(cache))
    loaded: list[Path] = []
    monkeypatch.setattr(
        build, "CDLL", lambda path, *a, **k: loaded.append(Path(path).resolve()) or ctypes.CDLL(path, *a, **k)
    )
    both = []
    for folder in (carried, cache / "none"):
        monkeypatch.setattr(packaged, "LIBRARIES", folder)
        for module in MODULES:
            module.functions.cache_clear()
        loaded.clear()
        both.append(results())
        libraries = [path for path in loaded if "gomp" not in path.name]
        place = carried if folder == carried else cache.resolve() / "native"
        assert len(libraries) == len(packaged.FORMS) and {path.parent for path in libraries} == {place}
    for pair in zip(*both, strict=True):
        assert torch.equal(*map(torch.as_tensor, pair))


@compiles
@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(not NAMES, reason="no set fits this processor")
def test_packaged_functions_need_neither_a_compiler_nor_a_home(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packaged, "LIBRARIES", made)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("OUTPACE_CACHE", "/dev/null/cache")
    assert isinstance(draw.functions(), ctypes.CDLL) and not caplog.records
    monkeypatch.setattr(build, "instructions", frozenset)  # no set fits, as without /proc
    if MACHINE == "x86_64":
        assert "there is no program 'no-such-compiler'" in str(draw.functions.__wrapped__())


@compiles
@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(not NAMES, reason="no set fits this processor")
@pytest.mark.parametrize("harm", ["damaged", "open to others", "a link", "not loadable", "absent"])
def test_a_packaged_library_that_is_not_as_it_was_built_is_compiled_here(
    harm: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(made, tmp_path / "libraries")
    monkeypatch.setattr(packaged, "LIBRARIES", folder)
    for path in folder.glob("move-*"):
        data = path.read_bytes()
        if harm == "damaged":
            path.write_bytes(data[:4096] + bytes(64) + data[4160:])
        elif harm == "open to others":
            path.chmod(0o666)
        elif harm == "a link":
            path.unlink()
            path.symlink_to(made / path.name)
        elif harm == "not loadable":
            path.rename(folder / packaged.sealed(path.stem.rpartition("-")[0], b"no library", ".so"))
            next(folder.glob("move-*")).write_bytes(b"no library")
        else:
            path.unlink()
    assert isinstance(move.functions(), ctypes.CDLL)
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [harm != "absent"] * len(said) == [True] * (harm != "absent")
    assert all("is not used: " in line and "compiled here" in line for line in said)


@compiles
@pytest.mark.usefixtures("forgotten")
@pytest.mark.skipif(not NAMES, reason="no set fits this processor")
def test_a_packaged_library_is_trusted_as_far_as_the_code_beside_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems install packages so that a group may write to them."""
    folder = shutil.copytree(made, tmp_path / "libraries")
    module = tmp_path / "build.py"
    module.touch()
    for path in (module, *folder.iterdir()):
        path.chmod(0o664)
    monkeypatch.setattr(packaged, "LIBRARIES", folder)
    monkeypatch.setattr(build, "__file__", str(module))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert isinstance(move.functions(), ctypes.CDLL)
    module.chmod(0o644)
    assert isinstance(move.functions.__wrapped__(), str)


def test_a_machine_without_sets_and_a_failing_compiler_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OutpaceError, match="for x86_64 and aarch64, not for riscv64"):
        list(packaged.make_libraries(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(OutpaceError, match=r"no-such-compiler cannot be run: .*; set CC to gcc"):
        list(packaged.make_libraries(tmp_path, "no-such-compiler"))
    with pytest.raises(OutpaceError, match=r"^false .* failed.*set CC to gcc 11 or later, or to zig$"):
        list(packaged.make_libraries(tmp_path, "false"))
