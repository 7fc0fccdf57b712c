"""The outer search: propose recipes (layouts of a training step) by rough prices of layer classes."""
