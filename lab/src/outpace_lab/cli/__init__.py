"""Commands of the laboratory, which outpace's command line finds as a plug-in."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to outpace's command line; each module registers its own with ``outpace.cli.app``."""
    from outpace_lab.cli import bench, datastore, drift, gguf, grow, scaling, search, train, tune  # noqa: F401
