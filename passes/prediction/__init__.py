"""Predict a choice's step time and memory with the cost models, and name its layout."""
