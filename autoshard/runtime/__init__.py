"""Running: the simulator, torch.distributed, and the modules a user holds."""
