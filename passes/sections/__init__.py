"""A model folded into sections, which are counted and priced under every layout."""
