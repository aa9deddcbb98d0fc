"""Forwards of a model whose layers are on two devices that do not exist, in a separate process.

The devices have shapes and no data (torch's fake tensors); an operation on tensors of both raises an error.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from models import tiny_llama
from outpace.targets import CausalTarget, Rows
from outpace.targets.batch import Batch
from unit.targets.test_causal import places_of, spread

FIRST, SECOND = "pretended:0", "pretended:1"


class Backend(_DummyBackendModule):
    """The functions that torch requires of a kind of device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]


def pretend(model: Any, mode: FakeTensorMode, places: dict[str, str]) -> None:
    """Replace the data of a model by shapes on devices."""
    for part, device in places.items():
        for module in model.get_submodule(part).modules():
            for key, value in module._buffers.items():
                module._buffers[key] = mode.from_tensor(value).to(device)
            for key, value in module._parameters.items():
                if value is not None:
                    shape = mode.from_tensor(value.detach()).to(device)
                    module._parameters[key] = torch.nn.Parameter(shape, requires_grad=False)


def devices_of(target: CausalTarget) -> dict[str, Any]:
    """Devices of the rows, the logits and the hidden states, over forwards as an engine makes them."""
    cache = target.new_cache(slots=2, length=8)
    tree, one = cache.allocate(), cache.allocate()
    target.forward(cache, Batch.of({tree: list(range(9))}, None))  # more rows than it had room for
    cache.keep({tree: range(9)})
    for _ in range(2):
        feeds = {tree: Rows([1, 2, 3], [-1, 0, 0]), one: Rows([5])}
        output = target.forward(cache, Batch.of(feeds), [1, -1])
        cache.keep({tree: [0, 2], one: [0]})
    block = cache.read_rows(tree, 0, 4)
    other = cache.allocate()
    cache.write_rows(other, block)
    cache.truncate(tree, 10)
    return {
        "rows": [str(shape.keys.device) for shape in cache.layers],
        "logits": str(output.logits_of(tree).device),
        "hidden": [str(state.device) for state in output.hidden[tree].values()],
    }


def main() -> None:
    spreads = [[FIRST, SECOND], [SECOND, FIRST]]
    models = [tiny_llama(layers=4) for _ in spreads]
    _setup_privateuseone_for_python_backend("pretended", Backend())
    for model, devices in zip(models, spreads, strict=True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # numbers from the host
        with mode, torch.no_grad():
            pretend(model, mode, places_of(model, devices))
            target = CausalTarget(spread(model, devices), check=False, plan="stock")
            found = devices_of(target)
        print(json.dumps([devices, found]))


if __name__ == "__main__":
    main()
