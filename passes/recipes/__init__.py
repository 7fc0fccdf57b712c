"""Recipes: priced, bounded, searched and explained."""
