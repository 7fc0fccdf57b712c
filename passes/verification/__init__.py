"""Proves that a lowered program computes the results of the traced program, without using any code of lowering."""
