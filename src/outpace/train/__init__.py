"""Training of learned drafters: data, objectives, the loop, the held-out metric, and online learning."""

from outpace.train.online import Online
from outpace.train.topics import Topics
from outpace.train.trainee import Learning

__all__ = ["Learning", "Online", "Topics"]
