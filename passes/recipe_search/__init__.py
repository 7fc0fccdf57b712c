"""Recipes searched, bounded and explained."""
