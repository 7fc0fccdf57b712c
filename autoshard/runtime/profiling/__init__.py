"""Profiles of steps: named ranges of programs, and the recording of their times."""
