"""Solve assignments: one option per variable at least cost, within memory; nothing here knows of programs."""
