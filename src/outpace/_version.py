"""The version of the package, read by hatchling too."""

__version__ = "0.1.0"
