"""Brings a traced program into the form that planning expects."""
