"""Rewrites of torch.fx graphs that know no engine."""
