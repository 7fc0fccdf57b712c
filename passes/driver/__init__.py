"""Compile, plan and verify: what stands between a user's call and the passes."""
