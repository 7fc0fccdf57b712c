"""Everything that decides about a program or rewrites it, one pass in each file. `driver` calls them in order."""
