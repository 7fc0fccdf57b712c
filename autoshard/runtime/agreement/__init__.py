"""Ranks compare their calls before the calls run. If a rank does not answer in time, the others raise an error that
names it."""
