"""Prove that padding of a program's inputs changes no element of its results outside their own padding."""
