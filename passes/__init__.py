"""Passes over programs: each file holds one, named for what it does; `pipeline` holds their order."""
