"""Settings and hooks of all tests."""

from running import pytest_collection, pytest_runtest_setup

__all__ = ["pytest_collection", "pytest_runtest_setup"]
