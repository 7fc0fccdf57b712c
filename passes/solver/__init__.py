"""Solve assignments: one option for each variable at least cost, within memory. This folder knows no programs."""
