"""A first token of a model without a cache: whether it takes outpace's inputs, and the shapes of its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from transformers import Cache as ModelCache

from outpace.cache import LayerShape, RowShape
from outpace.core import UnsupportedModel, described, out_of_memory
from outpace.targets.inputs.config import family
from outpace.targets.inputs.context import ForwardContext
from outpace.targets.inputs.forward import CacheAdapter

Result = TypeVar("Result")


class Probe(CacheAdapter):
    """Recorder of each layer's rows, which it returns unchanged: a first token without a cache.

    Attributes:
        rows: layer of the model -> its keys and values, each [1, heads, width, size].
    """

    def __init__(self) -> None:
        ModelCache.__init__(self, layers=[])
        self.context = ForwardContext()
        self._columns = self._width = 1
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def shapes(self) -> dict[int, LayerShape]:
        """Layer of the model -> shape of its rows."""
        shapes = {}
        for layer, pair in sorted(self.rows.items()):
            keys, values = (RowShape(s.shape[1], s.shape[3], s.dtype, s.device) for s in pair)
            shapes[layer] = LayerShape(keys, values)
        return shapes

    def layout(self, model: Any) -> tuple[dict[int, int], list[LayerShape]]:
        """Layer of the model -> layer of a cache for it, and the shapes of the cache's layers.

        Raises:
            UnsupportedModel: the model wrote no rows.
        """
        if not self.rows:
            raise UnsupportedModel(
                f"{family(model)} does not keep its keys and values in the cache it is given"
            )
        shapes = self.shapes
        return {layer: number for number, layer in enumerate(shapes)}, list(shapes.values())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.rows[layer_idx] = (key_states, value_states)
        return key_states, value_states


def probed(model: Any, taken: str, run: Callable[[], Result], plain: Callable[[], Any]) -> Result:
    """The result of a model's first forward with outpace's inputs.

    Args:
        taken: what those inputs are.
        run: the forward.
        plain: the model's own forward without them. If it fails too, the reason is the model itself.

    Raises:
        UnsupportedModel: it failed; named by family, with the reason. The error itself, if it means out of
            memory.
    """
    try:
        return run()
    except UnsupportedModel:
        raise  # it names the reason itself
    except Exception as error:
        try:
            if out_of_memory(error):
                raise
            plain()
        except Exception as stock:
            if out_of_memory(stock):
                raise
            raise UnsupportedModel(
                f"{family(model)} cannot run on a single token by itself, without outpace: {described(stock)}"
            ) from stock
        raise UnsupportedModel(f"{family(model)} does not take {taken}: {described(error)}") from error
