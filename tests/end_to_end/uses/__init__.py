"""Uses that demanding users tried, one module for each kind; every module's `USES` is part of the one table."""
