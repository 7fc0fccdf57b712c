"""What a plan is asked: explain, why_not, limits."""
