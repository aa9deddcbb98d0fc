"""Folders of the laboratory's drafters that are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outpace.core import OutpaceError
from outpace.learned.folder import read_weights, write_folder
from outpace_lab.drafters.blockwise import BlockwiseConfig, BlockwiseHeads
from outpace_lab.drafters.layers.exit_adapter import Adapter, AdapterConfig
from outpace_lab.train.trained import TrainedPart
from unit.test_files import HUGE, target

KINDS = {BlockwiseHeads: BlockwiseConfig(draft_vocabulary=40), Adapter: AdapterConfig(draft_vocabulary=40)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [HUGE, -5])
def test_drafted_ids_beyond_the_vocabulary_are_refused(
    kind: type[TrainedPart], value: int, tmp_path: Path
) -> None:
    kind.new(KINDS[kind], target()).save(tmp_path)
    described, tensors = json.loads((tmp_path / "config.json").read_text()), read_weights(tmp_path)
    tensors["drafted.ids"] = torch.full_like(tensors["drafted.ids"], value)
    write_folder(tmp_path, described, tensors)
    with pytest.raises(OutpaceError, match=r"tensor 'drafted\.ids' must ascend"):
        kind.load(tmp_path, target())


def test_a_part_of_a_layer_is_refused(tmp_path: Path) -> None:
    Adapter.new(KINDS[Adapter], target()).save(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    described["config"]["layers"] = 1.5
    write_folder(tmp_path, described, read_weights(tmp_path))
    with pytest.raises(OutpaceError, match=r"layers is 1\.5"):
        Adapter.load(tmp_path, target())
