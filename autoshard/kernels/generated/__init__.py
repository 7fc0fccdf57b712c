"""Triton kernels that are written for a group of operators: what a group is, its loops, its source, its operator."""
