"""Parts that all ways to adapt have."""
