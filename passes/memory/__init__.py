"""Lifetimes and bytes of values in memory, as a function of the plan."""
