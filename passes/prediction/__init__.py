"""Predictions of the cost models for a plan, and the names of its layouts."""
