"""Generates a Triton kernel for each group of fusible operators, and defines each kernel as an operator of torch."""
