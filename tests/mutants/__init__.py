"""Changes of the source on purpose, to see which of them the tests notice."""
