"""Ranks compare their calls before the calls run. If a rank does not come, all ranks raise an error that names it."""
