"""Generates Triton kernels for groups of operators, and defines each kernel as an operator of torch."""
