"""From a planned program to what a rank runs: local shapes, collectives, phases, kernels."""
