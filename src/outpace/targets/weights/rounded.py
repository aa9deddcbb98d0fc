"""Loading of checkpoints whose weights are rounded by groups, into the compiled products for 8 and 4 bits.

transformers loads such a checkpoint by a package of its vendor. A quantiser of outpace's takes that package's
place: it leaves all other tensors to transformers, and reads those of rounded layers itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from outpace.core import OutpaceError, UnsupportedModel
from outpace.native.layers import functions
from outpace.targets.cpu.kernels import QUANTISED
from outpace.targets.cpu.layouts import Blocks
from outpace.targets.cpu.linear import RoundedLinear
from outpace.targets.weights.groups import Layout, layout_of

_METHOD = "outpace"
DTYPE = torch.bfloat16  # of a product's rows


def is_rounded(config: Any) -> bool:
    """True if a checkpoint's weights are rounded in a layout that is read here on a CPU."""
    return layout_of(_quantisation(config)) is not None


def rounded_options(config: Any, shown: str, dtype: torch.dtype | str = "auto") -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that read rounded weights on a CPU; none for other checkpoints.

    Args:
        config: the checkpoint's, which stays unchanged.
        shown: the model's name, for messages.
        dtype: the one that is asked for, or "auto".

    Raises:
        UnsupportedModel: the compiled products do not take its layout; the message has the reason.
        OutpaceError: another dtype than bfloat16 is asked for.
    """
    if (layout := layout_of(found := _quantisation(config))) is None:
        method = found.get("quant_method") if isinstance(found, Mapping) else None
        if isinstance(method, str) and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
            raise _refusal(shown, method, "neither outpace nor transformers knows it")
        return {}
    if why := layout.why_refused():
        raise _refusal(shown, found["quant_method"], why)
    if isinstance(library := functions(DTYPE), str):
        raise _refusal(shown, found["quant_method"], f"its products are compiled functions: {library}")
    if dtype not in ("auto", DTYPE):
        raise OutpaceError(
            f"{shown} has rounded weights, whose products take rows in bfloat16; leave "
            f"--dtype {str(dtype).removeprefix('torch.')} out"
        )
    config = copy.deepcopy(config)
    config.quantization_config = {"quant_method": _METHOD, "original": found}
    return {"config": config, "dtype": DTYPE}


def _quantisation(config: Any) -> Any:
    return getattr(config, "quantization_config", None)


def _refusal(shown: str, method: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{shown} is rounded by {method}, and cannot be read: {why}")


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):
    """transformers' config of the quantiser below.

    Args:
        original: the checkpoint's own ``quantization_config``.
    """

    def __init__(self, original: Mapping[str, Any], **more: Any) -> None:
        self.quant_method: Any = _METHOD
        self.original = original


@register_quantizer(_METHOD)
class _Quantiser(HfQuantizer):
    """Rounded layers in place of those whose tensors in the checkpoint are rounded."""

    requires_calibration = True
    quantization_config: Any

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Iterable[str] = (), **more: Any
    ) -> None:
        self._files = list(checkpoint_files)
        self._bits: dict[str, int] = {}
        layout, head = self._layout, model.get_output_embeddings()
        with _Tensors(self._files) as tensors:
            modules, ending = dict(model.named_modules()), f".{layout.marks}"
            for name in sorted(name.removesuffix(ending) for name in tensors.files if name.endswith(ending)):
                module = modules.get(name)
                if type(module) is not nn.Linear or module is head:
                    what = "its head" if module is head else "no linear layer in transformers' form of it"
                    raise self._refused(model, f"{name} is rounded, and is {what}")
                shapes = {part: tensors.shape(f"{name}.{part}") for part in (layout.packed, layout.scales)}
                found = {part: shape for part, shape in shapes.items() if shape is not None}
                try:
                    bits = layout.check(name, found, module.in_features, module.out_features)
                except UnsupportedModel as error:
                    raise self._refused(model, str(error)) from error
                self._bits[name] = bits
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, RoundedLinear(module, QUANTISED[f"int{bits}"]))
        if not self._bits:
            raise self._refused(model, f"none of its tensors is a {layout.marks}")

    def _process_model_after_weight_loading(self, model: Any, **more: Any) -> Any:
        layout = self._layout
        with _Tensors(self._files) as tensors, torch.inference_mode(False), torch.no_grad():
            for name, bits in self._bits.items():
                module = model.get_submodule(name)
                sizes = module.in_features, module.out_features
                try:
                    groups = layout.read(partial(tensors.part, name), bits, *sizes)
                except UnsupportedModel as error:
                    raise self._refused(model, f"{name}: {error}") from error
                module.take(Blocks.of_numbers(*groups, bits))
        return model

    @property
    def _layout(self) -> Layout:
        layout = layout_of(self.quantization_config.original)
        assert layout is not None
        return layout

    def _refused(self, model: Any, why: str) -> UnsupportedModel:
        return _refusal(model.config.name_or_path, self.quantization_config.original["quant_method"], why)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class _Tensors:
    """The tensors of several files in safetensors format, read one at a time.

    Attributes:
        files: name of a tensor -> its opened file.
    """

    def __init__(self, files: Iterable[str]) -> None:
        self._paths = list(files)
        self._stack = ExitStack()
        self.files: dict[str, Any] = {}

    def __enter__(self) -> _Tensors:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, "pt"))
            self.files |= dict.fromkeys(file.keys(), file)
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def part(self, module: str, ending: str) -> Tensor | None:
        file = self.files.get(name := f"{module}.{ending}")
        tensor: Tensor | None = None if file is None else file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...] | None:
        file = self.files.get(name)
        return None if file is None else tuple(file.get_slice(name).get_shape())
