"""What modules keep beside weights: numbers, functions, settings in a config, which a copy of them has too.

A step's modules are copies with shared weights: an attribute that is set on the model afterwards is not in
them. So the attributes that a target was made with are compared with the model's when a text begins.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import unwrap
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, dict, set, frozenset)
# What every module has, as its dicts of weights, of modules and of hooks, which are compared elsewhere.
_OWN = frozenset(vars(nn.Module())) - {"training"}
# Set on models by what loads, trains or accelerates them; no forward in evaluation mode reads them.
_UNREAD = frozenset({
    "_is_hf_initialized", "gradient_checkpointing", "_gradient_checkpointing_func", "name_or_path",
    "warnings_issued", "generate", "__getstate__", "forward", "_hf_hook", "_old_forward",
    "_require_grads_hook", "_compiled_call_impl", "model_tags", "is_parallelizable", "model_parallel",
})  # fmt: skip
# Of a config: how outputs are kept, what a model is called, the dtype that saving a model notes. Nor are its
# end tokens, which a call may change.
_UNREAD_SETTINGS = frozenset({
    "use_cache", "dtype", "name_or_path", "_name_or_path", "transformers_version", "_commit_hash",
    "architectures", "id2label", "label2id", "problem_type", "_experts_implementation_internal",
    "tie_word_embeddings",
})  # fmt: skip
_MISSING = object()
_SHOWN = 4  # changes that are named


def attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes that can be compared: numbers, texts, functions, and lists of these."""
    kind: Any = type(module)
    unread = _OWN | _UNREAD | set_in_forward(kind)
    return {name: value for name, value in vars(module).items() if name not in unread and _comparable(value)}


@cache
def set_in_forward(kind: type[nn.Module]) -> frozenset[str]:
    """The names of attributes that a class's own forward sets, or a method that it runs.

    They say what was run last, as the offsets of an image's positions, and not what the model is.
    """
    found: set[str] = set()
    seen, ahead = {""}, ["forward"]
    while ahead:
        seen.add(name := ahead.pop())
        code = getattr(unwrap(getattr(kind, name)), "__code__", None)
        if code is None:
            continue
        steps = (step for step in dis.get_instructions(code) if step.opcode != dis.EXTENDED_ARG)
        for before, step in pairwise(steps):  # one step may load two names
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if step.opname == "STORE_ATTR" and loaded[-1] == "self":
                found.add(step.argval)
        own = {name for name in code.co_names if callable(getattr(kind, name, None))}
        ahead += sorted(name for name in own - seen if not hasattr(nn.Module, name))
    return frozenset(found)


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """What a config says that a forward may read."""
    return {
        name: value
        for name, value in vars(config).items()
        if name not in _UNREAD_SETTINGS
        and not name.endswith(("_token_id", "_token_index"))
        and not name.lstrip("_").startswith("output_")
        and _comparable(value)
    }


def fingerprint(model: Any) -> int:
    """A number that is another in this process once attributes or settings of a model are."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    found = [attributes(module) for module in modules]
    configs = [config for one in modules for config in vars(one).values() if _is_config(config)]
    return hash(str([found, list(map(settings, {id(config): config for config in configs}.values()))]))


def _is_config(value: Any) -> bool:
    return isinstance(value, PretrainedConfig)


def _comparable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_comparable, value.values()))
    if isinstance(value, _CONTAINERS):
        return all(map(_comparable, value))
    return isinstance(value, PLAIN) or (callable(value) and not isinstance(value, Tensor | nn.Module))


def _copied(value: Any) -> Any:
    """A value as it is now, of which lists and dicts may be changed in place later."""
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, set | frozenset):
        return set(value)
    if isinstance(value, list):
        return list(map(_copied, value))
    return tuple(map(_copied, value)) if type(value) is tuple else value


class _Space:
    """The attributes of one module or config, as they were.

    Args:
        space: its ``__dict__``.
        known: those that are watched.
        of: its class, where an attribute that is set later may hide a method or a number.
    """

    def __init__(self, space: Mapping[str, Any], known: Mapping[str, Any], of: Any) -> None:
        self.space, self.of, self.size = space, of, len(space)
        self.then = {name: _copied(value) for name, value in known.items()}
        names = list(known)
        self.read: Callable[[Any], Any] = itemgetter(*names) if names else lambda space: ()
        self.found = self.read(self.then)

    def same(self) -> bool:
        """True if all are as they were; fast, since it is asked of every module when a text begins."""
        try:
            same: bool = self.read(self.space) == self.found
        except KeyError:
            return False
        return same and (len(self.space) == self.size or next(self._added(), None) is None)

    def _added(self) -> Iterator[str]:
        """The names of attributes that were not there, and hide one of the class."""
        unread = _OWN | _UNREAD | (set_in_forward(self.of) if self.of else frozenset())
        for name in self.space.keys() - self.then.keys() - unread:
            if hasattr(self.of, name) and _comparable(self.space[name]):
                yield name

    def differing(self) -> Iterator[tuple[str, str]]:
        """The names of those that differ, each with what became of it."""
        for name, then in self.then.items():
            now = self.space.get(name, _MISSING)
            if now is _MISSING:
                yield name, "was removed"
            elif now is not then and now != then:
                yield name, f"was {_shown(then)} and is {_shown(now)}"
        if len(self.space) != self.size:
            yield from ((name, "was set") for name in self._added())


def _shown(value: Any) -> str:
    text = (
        repr(value) if isinstance(value, (*PLAIN, *_CONTAINERS)) else getattr(value, "__qualname__", "other")
    )
    return text if len(text) <= 60 else f"{text[:60]}..."


class Attributes:
    """Detector of attributes of a model's modules, and of settings of its configs, that were changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules: list[Any] = list(model.modules())
        self._modules = [_Space(vars(one), attributes(one), type(one)) for one in modules]
        configs = {
            id(config): config for one in modules for config in vars(one).values() if _is_config(config)
        }
        self._configs = [
            (config, _Space(vars(config), settings(config), None)) for config in configs.values()
        ]
        # A tensor that is neither a weight nor a buffer: another one is not in a copy.
        self._tensors = [
            (one, name, value)
            for one in modules
            for name, value in vars(one).items()
            if isinstance(value, Tensor) and name not in set_in_forward(one.__class__)
        ]
        self._all = modules
        self._kinds: list[Any] = list(map(type, modules))
        self._forwards = {kind: kind.forward for kind in self._kinds}

    def changed(self, everywhere: bool = True) -> str | None:
        """What is other in the modules, by its name; None if nothing is.

        Args:
            everywhere: look at all modules, and not only at those of transformers' models, for whose numbers
                steps stand with masks and caches of their own, whatever they run.
        """
        if all(space.same() for space in self._modules):
            return self._others() if everywhere else None
        other = [
            f"{path}.{name} {became}".lstrip(".")
            for (path, _), space in zip(self._model.named_modules(), self._modules, strict=False)
            if not space.same() and (everywhere or space.of.__module__.startswith("transformers"))
            for name, became in space.differing()
        ]
        return "; ".join(other[:_SHOWN]) or None

    def _others(self) -> str | None:
        for module, name, value in self._tensors:
            if vars(module).get(name) is not value:
                return f"the tensor {name} of a {type(module).__name__} is another"
        if list(map(type, self._all)) != self._kinds:
            return "the class of a module was replaced"
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                return f"{kind.__name__}.forward was replaced"
        return None

    def reconfigured(self) -> str | None:
        """What is other in the configs, by its name; None if nothing is."""
        for config, space in self._configs:
            if not space.same():
                name, became = next(space.differing())
                return f"{type(config).__name__}.{name} {became}"
        return None
