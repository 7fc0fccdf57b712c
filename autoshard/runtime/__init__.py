"""Runs compiled programs on the simulator or torch.distributed, behind the modules and steps that `compile` returns."""
