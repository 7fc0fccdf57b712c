"""Proofs that padding of inputs reaches no result of a program."""
