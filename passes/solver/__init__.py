"""Solve assignment problems: choose one option for each variable, at the least total cost, within a memory limit.

This folder knows nothing of programs or tensors: a problem consists of arrays of costs and bytes.
"""
