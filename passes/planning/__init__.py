"""The planning problem of a program: building, restricting and searching it."""
