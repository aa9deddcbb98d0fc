"""The command line: one file per command, and files shared by several commands.

torch, transformers and the rest of outpace are imported inside functions or by the ``*_run`` files, which a
command imports when it runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import sys

from outpace.cli.app import INTERRUPTED, add_plugins, app

# Each module registers its command; --help lists them in this order.
# isort: off
from outpace.cli import demo, generate, chat, drafters, new_drafter, bench, models, env, serve  # noqa: F401
# isort: on

add_plugins(app)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A model may emit characters that the terminal's encoding lacks.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
