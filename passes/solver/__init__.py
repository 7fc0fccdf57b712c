"""Solve assignment problems: one option for each variable, at the least total cost, within a memory limit.

Nothing here knows programs or tensors: a problem consists of arrays of costs and bytes.
"""
