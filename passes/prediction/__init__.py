"""Predict the step time and memory of a lowered plan with the cost models, and name its layouts (ZeRO-3, split)."""
