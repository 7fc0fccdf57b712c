"""Bring a traced program into the canonical form that planning expects, and cut it into pipeline stages."""
