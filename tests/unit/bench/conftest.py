"""Tiny models, as in ``bench_models``."""

from bench_models import chat_model, ending_model, model

__all__ = ["chat_model", "ending_model", "model"]
