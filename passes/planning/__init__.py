"""The planning problem of a program: built, restricted, searched, and its memory counted."""
