"""Weights of compiled models: initialised, read from files, and written to files."""
