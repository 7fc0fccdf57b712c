"""Triton kernels generated for groups of operators: the groups, their loops, their sources, their operators."""
