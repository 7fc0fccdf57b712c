"""Ways to adapt."""
