"""Ranks compare their calls before they run, and name the rank that does not come."""
