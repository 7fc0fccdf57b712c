"""Solve assignment problems: one option for each variable, at the least total cost, within a memory limit.

These files import nothing about programs or tensors. A problem consists of arrays of costs and bytes.
"""
