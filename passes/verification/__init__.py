"""Proves that a lowered program computes the results of the traced program. No code is shared with lowering."""
