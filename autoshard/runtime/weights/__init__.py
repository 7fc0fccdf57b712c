"""Initialises, loads and exports the weights of compiled models, shard by shard."""
