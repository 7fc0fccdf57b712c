"""Build the planning problem of a program, restrict its choices, and solve it."""
