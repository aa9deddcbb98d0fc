"""Memory of packed weights."""

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from outpace.native import memory


def test_no_two_tensors_share_a_byte() -> None:
    made = [memory.zeros(3, size, dtype=torch.bfloat16) for size in (1, 31, 33, 1000, 70_000, 1)]
    for number, tensor in enumerate(made, 1):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(made, 1))


def test_memory_taken_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        found = memory._Slabs().take(100)
    found.fill_(1)
    assert not found.is_inference()


def test_a_tensor_may_be_larger_than_what_is_asked_for_at_once() -> None:
    size = 40 << 20
    found = memory.zeros(size + 3, dtype=torch.uint8)
    assert len(found) == size + 3
    assert not found[::4096].any()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="the system has no huge pages to ask for")
def test_memory_goes_back_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __init__(self, *_: object, **__: object) -> None:
            given.append(weakref.ref(self))

    monkeypatch.setattr(memory.mmap, "mmap", Mapping)
    slabs = memory._Slabs()
    first, second = slabs.take(memory.HUGE), slabs.take(100)
    slabs.take(40 << 20)  # from now on, memory of another piece
    assert [each() is None for each in given] == [False, False]
    del first
    gc.collect()
    assert given[0]() is not None
    del second
    gc.collect()
    assert [each() is None for each in given] == [True, False]


def test_a_system_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    found = memory.zeros(2, 3, dtype=torch.float32)
    assert found.shape == (2, 3)
    assert not found.any()


@pytest.mark.parametrize(
    ("setting", "said"),
    [("always [madvise] never", "huge"), ("always madvise [never]", "echo madvise"), (None, "usual")],
)
def test_what_is_said_of_pages(setting: str | None, said: str, tmp_path: Path) -> None:
    if setting is not None:
        path = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
        path.parent.mkdir(parents=True)
        path.write_text(setting + "\n")
    assert said in memory.pages(tmp_path)
