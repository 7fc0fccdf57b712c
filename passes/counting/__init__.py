"""Costs of plans as expressions in sizes."""
