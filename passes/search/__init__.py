"""The outer search: layouts of a training step, proposed by rough prices."""
