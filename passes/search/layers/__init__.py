"""The layer classes of a model: kernels, collectives and values are counted once, and priced under every layout."""
