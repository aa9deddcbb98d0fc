"""Every option of the laboratory's drafters; see ``tests/lossless/test_options.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lossless import test_options
from lossless.conftest import Lab
from lossless.test_options import check, check_every, some
from stored import with_datastore
from taught import with_trained

# What drafters need besides their options.
NEEDED = {
    "blockwise": "path={trained}",
    "cascade": "draft=(draft_model:num_speculative_tokens=3),inner=(prompt_lookup)",
    "parallel_tokens": "path={trained}",
    "retrieval": "path={datastore}",
    "spec_drafter": "path={trained}",
}
NAMES = [*NEEDED, "early_exit", "self_speculative", "token_recycling", "windowed"]


def ready(spec: str) -> str:
    return with_trained(with_datastore(spec))


@pytest.fixture(autouse=True)
def needed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, own in NEEDED.items():
            patch.setitem(test_options.NEEDED, name, own)
        yield


def settings() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, own in NEEDED.items():
            patch.setitem(test_options.NEEDED, name, own)
        return [spec for name in NAMES for spec in some(name)]


@pytest.mark.parametrize("spec", settings())
def test_some_settings(exact: Lab, spec: str) -> None:
    check(exact, ready(spec))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_setting(exact: Lab, name: str) -> None:
    check_every(exact, name, ready)
