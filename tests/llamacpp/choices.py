"""Choices of kernels that are forced, so that no timing and no processor decides what is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outpace.targets.llamacpp import target as target_module
from outpace.targets.llamacpp.layouts import SHARES
from outpace.targets.llamacpp.library import LlamaModel
from outpace.targets.llamacpp.self_test import SelfTest, Widths

THREE, SEVEN = Widths(1, 3, 4), Widths(1, 7, 8)


def forced(patch: pytest.MonkeyPatch, found: list[Any], seconds: Any = None) -> list[bool]:
    """Let self-tests find these widths and seconds, repacked and not; returns which weights are loaded."""
    loaded: list[bool] = []
    load = LlamaModel.__init__

    def noted(self: LlamaModel, path: Path, layers: int, repack: bool = True) -> None:
        loaded.append(repack)
        load(self, path, layers, False)  # some builds end the process where weights are repacked
        self.repack = self.repacked = repack

    def widths(self: SelfTest) -> Widths | None:
        self._target.widths = answers.pop(0)
        return self._target.widths

    answers = list(found)
    patch.setattr(target_module, "amx_fails", lambda folder: False)
    patch.setattr(LlamaModel, "__init__", noted)
    patch.setattr(SelfTest, "widths", widths)
    patch.setattr(target_module, "costs", lambda *_: [dict.fromkeys(SHARES, each) for each in seconds])
    return loaded
