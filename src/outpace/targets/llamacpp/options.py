"""Options of a model that llama.cpp runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outpace.core import OutpaceError

KvType = Literal["float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
GGML_TYPES = {  # ggml's numbers of dtypes
    "float32": 0, "float16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bfloat16": 30,
}  # fmt: skip

_SWITCH, _NUMBER = (bool, "true or false"), (int, "a whole number")
_KINDS = {
    "flash_attn": _SWITCH,
    "repack": _SWITCH,
    "threads": _NUMBER,
    "n_gpu_layers": _NUMBER,
}


@dataclass(frozen=True)
class LlamaCppOptions:
    """Options of a model that llama.cpp runs.

    Attributes:
        n_gpu_layers: number of layers on the GPU, -1 for all; 0 runs the model on the CPU.
        threads: number of llama.cpp's threads; None for torch's number.
        flash_attn: llama.cpp's flash attention; None for off in a float32 file, otherwise on. Without it
            the sums of a row depend on the other rows in the cache, and in a quantised model even a
            difference in the last bit of a sum soon grows.
        type_k, type_v: dtypes of keys and values; None for float32 in a float32 file, otherwise bfloat16 for
            keys and float16 for values. On a CPU llama.cpp's flash attention sums in one order for any number
            of rows and threads, unless both are of float16 and float32; of the other pairs measured this is
            the fastest. Quantised values need flash_attn.
        repack: repack weights for the processor on loading, as llama.cpp does by default; other kernels then
            multiply them. None chooses by the rows up to which bits are equal, and by the measured seconds of
            steps of 1 to 16 rows (``layouts.py``).
        exact: decode the rows of a step, of a tree or of several texts, in groups of such sizes that each row
            has the bits that it has alone. "auto" does so where such sizes are found, and otherwise gives
            the reason in ``why_inexact``; True refuses such a model. False decodes all rows of a step at
            once.
        check: run the self-test. "auto" does not repeat it where the user's cache has what it found for this
            file, these options and this machine (``findings.py``); True always runs it, False never.
    """

    n_gpu_layers: int = 0
    threads: int | None = None
    flash_attn: bool | None = None
    type_k: KvType | None = None
    type_v: KvType | None = None
    repack: bool | None = None
    exact: bool | Literal["auto"] = "auto"
    check: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name, (kind, words) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or getattr(type(self), name) is not None):
                raise OutpaceError(f"{name} must be {words}, not {value!r}")
        if self.threads is not None and self.threads < 1:
            raise OutpaceError(f"threads must be at least 1, not {self.threads}")
        if self.n_gpu_layers < -1:
            raise OutpaceError(f"n_gpu_layers must be at least 0, or -1 for all; not {self.n_gpu_layers}")
        for name in ("type_k", "type_v"):
            if getattr(self, name) not in (None, *GGML_TYPES):
                raise OutpaceError(
                    f"{name} must be one of {', '.join(GGML_TYPES)}; not {getattr(self, name)!r}"
                )
        if (self.type_v or "").startswith("q") and self.flash_attn is False:
            raise OutpaceError(f"type_v={self.type_v} needs flash attention; leave flash_attn=false out")
        for name in ("exact", "check"):
            value = getattr(self, name)
            if not isinstance(value, bool) and value != "auto":
                raise OutpaceError(f"{name} must be true, false or auto, not {value!r}")
        if self.exact is True and not self.check:
            raise OutpaceError("exact=true promises what the self-test finds; leave check=false out")
