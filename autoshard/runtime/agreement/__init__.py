"""How ranks compare their calls, and notice which rank is missing."""
