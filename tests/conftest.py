"""Settings and hooks of all tests."""

from running import pytest_runtest_setup

__all__ = ["pytest_runtest_setup"]
