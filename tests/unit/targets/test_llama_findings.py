"""What a GGUF file's self-test found: the choice between kernels by given costs, and what is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outpace.targets.llamacpp import findings
from outpace.targets.llamacpp.findings import Findings, about
from outpace.targets.llamacpp.layouts import MARGIN, SHARES, repacks
from outpace.targets.llamacpp.options import LlamaCppOptions
from outpace.targets.llamacpp.self_test import Widths
from outpace.targets.step import record

ANY, TWO, THREE, SEVEN = Widths(), Widths(2), Widths(1, 3, 4), Widths(1, 7, 8)


def choice(packed: Any, mapped: Any, slower: dict[int, float]) -> bool:
    """The choice where steps with mapped weights take these multiples of the others' seconds, else 1."""
    repacked = {rows: 0.01 * rows for rows in SHARES}
    return repacks(
        packed, mapped, [repacked, {rows: repacked[rows] * slower.get(rows, 1) for rows in SHARES}]
    )


def test_shares_are_of_a_whole() -> None:
    assert sum(SHARES.values()) == 1 and SHARES[1] == sum(SHARES[rows] for rows in SHARES if rows > 1)


@pytest.mark.parametrize(
    ("packed", "mapped", "slower", "repack"),
    [
        (SEVEN, SEVEN, dict.fromkeys(SHARES, 0.8), True),  # equal widths: repacked, unless clearly slower
        (SEVEN, SEVEN, dict.fromkeys(SHARES, 0.7), False),
        (SEVEN, THREE, dict.fromkeys(SHARES, 0.8), True),
        (SEVEN, TWO, {1: 2.0}, True),
        (THREE, SEVEN, dict.fromkeys(SHARES, 1.2), False),  # wider decodes, unless clearly slower
        (THREE, SEVEN, dict.fromkeys(SHARES, 1.4), True),
        (THREE, ANY, {1: 1.6}, False),  # a plain step has half of the weight
        (THREE, ANY, {1: 1.8}, True),
        (THREE, SEVEN, {16: 4.0}, False),  # a wide tree has an eighth
        (THREE, SEVEN, {2: 2.1, 4: 2.1, 8: 2.1}, True),
        (THREE, SEVEN, {1: 1.8, 4: 0.5, 8: 0.5, 16: 0.5}, False),  # plain steps against drafts
        (None, SEVEN, {}, False),  # equal bits at any cost
        (SEVEN, None, {}, True),
        (None, None, {}, True),
    ],
)
def test_kernels_are_chosen_by_costs(packed: Any, mapped: Any, slower: Any, repack: bool) -> None:
    assert choice(packed, mapped, slower) == repack


@pytest.mark.parametrize(("packed", "mapped", "repack"), [(SEVEN, SEVEN, True), (THREE, SEVEN, False)])
def test_noise_within_the_margin_chooses_the_same_kernels(packed: Any, mapped: Any, repack: bool) -> None:
    for noise in product((0.99 * MARGIN, 1.0, 1.01 / MARGIN), repeat=len(SHARES)):
        assert choice(packed, mapped, dict(zip(SHARES, noise, strict=True))) == repack


def test_findings_are_read_as_they_were_written() -> None:
    found = Findings(False, SEVEN, 0.0, {1: 0.1, 16: 1 / 3})
    assert Findings.read(found.text()) == found


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "null", "{}", '{"repack": true, "widths": {"most": 1, "other": 2}}']
)
def test_a_text_without_findings(text: str | None) -> None:
    assert Findings.read(text) is None


# -- what the findings depend on ---------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for llama.cpp, whose functions are not needed here."""
    (tmp_path / "lib").mkdir()
    for name in ("libllama.so", "libggml-cpu.so"):
        (tmp_path / "lib" / name).write_text("compiled")
    made = SimpleNamespace(
        __version__="0.3.36",
        llama_cpp=SimpleNamespace(_lib=SimpleNamespace(_name=str(tmp_path / "lib" / "libllama.so"))),
        llama_supports_gpu_offload=lambda: False,
        llama_print_system_info=lambda: b"AVX2 = 1",
    )
    monkeypatch.setattr(findings, "library", lambda: made)
    monkeypatch.setattr(findings, "_HEAD", 1 << 12)
    findings._build.cache_clear()
    yield made
    findings._build.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The first part of a split file."""
    for part in (1, 2):
        (tmp_path / f"model-0000{part}-of-00002.gguf").write_bytes(bytes(range(256)) * 2**15)
    return tmp_path / "model-00001-of-00002.gguf"


def key(path: Path, threads: int = 1, repack: bool = True, **options: Any) -> Any:
    return about(path, LlamaCppOptions(**options), threads, repack)


def written(path: Path, place: int, text: bytes) -> None:
    """Write into a file whose time of change stays."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        file.write(text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FILES: dict[str, Callable[[Path], None]] = {
    "metadata": lambda path: written(path, 100, b"x"),
    "weights": lambda path: written(path, 2**20, b"x" * 2**14),
    "weights of another part": lambda path: written(
        path.with_name("model-00002-of-00002.gguf"), 2**20, b"x" * 2**14
    ),
    "time": lambda path: os.utime(path, ns=(1, 1)),
    "size": lambda path: written(path, path.stat().st_size, b"x"),
}


@pytest.mark.parametrize("change", FILES)
def test_a_changed_file_is_another(change: str, path: Path, library: Any) -> None:
    before = key(path)
    assert key(path) == before
    FILES[change](path)
    after = key(path)
    assert {name for name in before if before[name] != after[name]} == {"file"}


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"repack": False},
        {"flash_attn": False},
        {"type_k": "float32"},
        {"type_v": "q8_0"},
        {"exact": False},
    ],
)
def test_with_other_options_other_things_are_found(options: Any, path: Path, library: Any) -> None:
    assert key(path, **options) != key(path)


def test_options_that_change_nothing_that_is_found(path: Path, library: Any) -> None:
    assert key(path, exact=True) == key(path, exact="auto") == key(path, check=True)
    assert LlamaCppOptions(threads=3) != LlamaCppOptions()
    assert about(path, replace(LlamaCppOptions(), threads=3), 3, True) == key(path, threads=3)


@pytest.mark.parametrize("change", ["version", "build", "features", "instructions", "variable", "source"])
def test_another_library_or_machine_is_tested(
    change: str, path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(path)
    if change == "version":
        library.__version__ = "0.3.37"
    elif change == "build":
        Path(library.llama_cpp._lib._name).with_name("libggml-cpu.so").write_text("compiled anew")
        findings._build.cache_clear()
    elif change == "features":
        library.llama_print_system_info = lambda: b"AVX512 = 1"
    elif change == "variable":
        monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    else:
        name = "_instructions" if change == "instructions" else "_own_source"
        monkeypatch.setattr(record, name, lambda: "other")
    assert key(path) != before


def test_a_build_that_is_not_known_has_no_record(path: Path, library: Any) -> None:
    library.llama_supports_gpu_offload = lambda: True
    assert key(path) is None
    library.llama_supports_gpu_offload = lambda: False
    library.llama_cpp._lib._name = str(path.with_name("elsewhere") / "libllama.so")
    assert key(path) is None
