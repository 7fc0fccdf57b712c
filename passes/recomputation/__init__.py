"""Values of the forward that are computed again, or fetched from the host, instead of kept."""
