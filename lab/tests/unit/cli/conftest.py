"""Tiny models, as in ``cli_models``."""

from cli_models import chat_folder, chat_model, folder, model, prompts, run

__all__ = ["chat_folder", "chat_model", "folder", "model", "prompts", "run"]
