"""Compile, plan and verify a user's call by the passes."""
