"""Trial of llama.cpp's kernels for AMX: some builds end the process in them.

A compiler may drop the stores to the tiles' configuration, since it does not see that an instruction reads it
(llama.cpp's pull request 26954); the first product of several rows is then an illegal instruction. No signal
of that kind can be caught, so one product is tried in a process of its own.

This file is run as a program, with the folder of llama.cpp's libraries as its argument.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

_BUFFER = "_Z28ggml_backend_amx_buffer_typev"
_Q8_0, _F32 = 8, 0  # ggml's types
_IN, _OUT, _ROWS = 64, 32, 4
_CONTEXT = 1 << 22  # bytes of tensors' descriptions


class _Params(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@lru_cache(maxsize=1)
def amx_fails(folder: Path) -> bool:
    """True if the libraries in a folder have kernels for AMX that are used here and do not work."""
    tried = [sys.executable, "-I", __file__, str(folder)]
    return subprocess.run(tried, capture_output=True, check=False).returncode < 0


def _product(folder: Path) -> None:
    """Multiply a few rows by weights in AMX's layout, if the library has one and the processor AMX."""
    base, cpu = (
        ctypes.CDLL(str(next(folder.glob(f"*ggml-{part}*"))), mode=ctypes.RTLD_GLOBAL)
        for part in ("base", "cpu")
    )
    if not hasattr(cpu, _BUFFER):
        return
    pointer, size = ctypes.c_void_p, ctypes.c_size_t

    def call(library: ctypes.CDLL, name: str, answer: type | None, *arguments: object) -> int:
        function = getattr(library, name)
        function.restype = answer
        return int(function(*arguments) or 0)

    def made(name: str, *arguments: object) -> ctypes.c_void_p:
        return pointer(
            call(cpu if name.startswith(("ggml_backend_cpu", "_Z")) else base, name, pointer, *arguments)
        )

    layout = made(_BUFFER)
    if not layout.value:
        return
    contexts = []
    for _ in range(2):
        base.ggml_init.argtypes = [_Params]
        contexts.append(made("ggml_init", _Params(_CONTEXT, None, True)))
    number = ctypes.c_int64
    weights = made("ggml_new_tensor_2d", contexts[0], _Q8_0, number(_IN), number(_OUT))
    made("ggml_backend_alloc_ctx_tensors_from_buft", contexts[0], layout)
    bytes_of = size(call(base, "ggml_nbytes", size, weights))
    zeros = ctypes.create_string_buffer(bytes_of.value)
    call(base, "ggml_backend_tensor_set", None, weights, zeros, size(0), bytes_of)
    rows = made("ggml_new_tensor_2d", contexts[1], _F32, number(_IN), number(_ROWS))
    product = made("ggml_mul_mat", contexts[1], weights, rows)
    graph = made("ggml_new_graph", contexts[1])
    call(base, "ggml_build_forward_expand", None, graph, product)
    backend = made("ggml_backend_cpu_init")
    call(cpu, "ggml_backend_cpu_set_n_threads", None, backend, 1)
    made("ggml_backend_alloc_ctx_tensors", contexts[1], backend)
    call(base, "ggml_backend_graph_compute", ctypes.c_int, backend, graph)


if __name__ == "__main__":
    _product(Path(sys.argv[1]))
