"""The command line. Thin: it parses, calls ``outpace.cli`` and says how it went.

torch and transformers are imported inside the commands only, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys

from outpace.cli import datastores, decoding, drafters, measuring, training  # noqa: F401  # each registers its commands
from outpace.cli.app import INTERRUPTED, app


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        # A model may say what the terminal's encoding lacks.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
