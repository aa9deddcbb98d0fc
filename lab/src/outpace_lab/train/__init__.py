"""Training of learned drafters: data, objectives, the loop, the held-out metric, and online learning."""

from outpace_lab.train.online import Online
from outpace_lab.train.topics import Topics
from outpace_lab.train.trainee import Learning

__all__ = ["Learning", "Online", "Topics"]
