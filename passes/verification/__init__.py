"""Prove that what lowering made computes what was traced; of lowering nothing is used."""
