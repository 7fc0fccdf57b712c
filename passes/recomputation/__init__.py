"""Restore values of the forward in the backward, by recomputation or from the host, instead of keeping them."""
