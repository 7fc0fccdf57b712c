"""Lightning's Trainer on a mesh. Needs lightning 2.5 or later."""

from autoshard.integrations.lightning.step_module import StepModule
from autoshard.integrations.lightning.strategy import MeshStrategy as Strategy

__all__ = ["StepModule", "Strategy"]
