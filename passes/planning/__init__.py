"""The planning problem of a program: construction, restriction, search and memory."""
