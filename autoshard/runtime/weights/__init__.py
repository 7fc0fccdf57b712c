"""Initialise the weights of compiled models, load them from files, and export them to files."""
