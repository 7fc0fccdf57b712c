"""The layer classes of a model: counted and priced under every layout."""
