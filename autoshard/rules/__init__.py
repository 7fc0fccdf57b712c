"""Sharding rules: what each operator does to indices, and the strategies that follow."""
