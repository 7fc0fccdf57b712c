"""Weights of compiled models: initialised, read from files, written to files."""
