"""Count the bytes in memory under a plan."""
