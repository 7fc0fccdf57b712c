"""transformers' Trainer on a mesh. Needs transformers 5 and accelerate."""

from autoshard.integrations.transformers.trainer import Trainer

__all__ = ["Trainer"]
