"""Keys and values of many sequences: the protocol, and caches of tensors."""

from outpace.cache.base import Cache, CacheFull, Place, Slot
from outpace.cache.kv import KVCache
from outpace.cache.lanes import LayerShape, RowShape, Window
from outpace.cache.states import NextStates, StateCache, StateShape, StateWindow
from outpace.cache.static import FixedCache, FixedRows, FixedWindow, StaticCache

__all__ = [
    "Cache",
    "CacheFull",
    "FixedCache",
    "FixedRows",
    "FixedWindow",
    "KVCache",
    "LayerShape",
    "NextStates",
    "Place",
    "RowShape",
    "Slot",
    "StateCache",
    "StateShape",
    "StateWindow",
    "StaticCache",
    "Window",
]
