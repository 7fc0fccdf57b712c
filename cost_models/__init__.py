"""Cost models: pure functions of plain numbers in SI units (seconds, bytes, FLOP/s), each with formula and source.

A leaf library: it imports neither autoshard nor passes. Constants live in `data/`, each with value, unit, source, date.
"""
