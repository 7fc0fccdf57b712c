"""Rewrites of torch.fx graphs that do not depend on the engine (simulator or torch.distributed) that runs the graph."""
