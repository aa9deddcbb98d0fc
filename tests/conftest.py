"""Hypothesis tries the same examples in every run, and none is too slow on a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("outpace", derandomize=True, deadline=None, database=None)
settings.load_profile("outpace")
