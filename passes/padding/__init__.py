"""Prove that padding of a program's inputs changes no clean element of its results, which are elements outside
padding.
"""
