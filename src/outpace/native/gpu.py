"""Whether Triton's kernels run on this machine's GPU."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

from outpace.core import first_line

_log = logging.getLogger(__name__)


@cache
def why_no_triton() -> str | None:
    """The reason why Triton's kernels do not run on this machine's GPU; None if they do.

    Triton compiles a part of each kernel with the machine's C compiler, which needs Python's headers and the
    driver's library. One small kernel, run once in a process, shows whether all of these are there.
    """
    if find_spec("triton") is None:
        return "kernels for GPUs need Triton (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        from outpace.native.gpu_probe import run

        run()
    except Exception as error:  # of Triton, its compilers or the driver
        reason = (
            f"Triton runs no kernel here: {first_line(error)}; install gcc and Python's headers, or set CC"
        )
        _log.warning("torch's operations are used, which are slower: %s", reason)
        return reason
    return None
