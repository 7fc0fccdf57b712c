"""Questions about a plan: explain, why_not, limits."""
