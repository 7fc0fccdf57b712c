"""From a planned program to a rank's program: local shapes, collectives, phases, kernels."""
