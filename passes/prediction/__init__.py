"""What the cost models say of a choice, and what it is called."""
