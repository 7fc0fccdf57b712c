"""Recomputation and offload of values of the forward."""
