"""Initialises, loads and exports the weights of compiled models, for each rank's shards alone."""
