"""Lower a planned program to the program that each rank runs: local shapes, collectives, phases, kernels."""
