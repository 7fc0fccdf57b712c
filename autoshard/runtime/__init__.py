"""Execution: the simulator, torch.distributed, and the modules that `compile` returns."""
