"""The outer search: recipes of a training step, proposed by rough prices."""
