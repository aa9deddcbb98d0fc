"""Settings, hooks and fixtures of all tests."""

from running import pytest_runtest_setup, trained_for_all

__all__ = ["pytest_runtest_setup", "trained_for_all"]
