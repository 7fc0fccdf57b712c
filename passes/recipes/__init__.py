"""Recipes counted and priced, and the plan of one."""
