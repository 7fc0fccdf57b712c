"""What is in memory when, as a function of the plan."""
