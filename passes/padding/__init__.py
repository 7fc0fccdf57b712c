"""Prove that padding of a program's inputs changes no element of its results outside the results' own padding."""
