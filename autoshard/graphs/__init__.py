"""Rewrites of torch.fx graphs that are independent of engines."""
