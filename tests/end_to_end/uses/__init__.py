"""Uses that demanding users tried, in a module for each kind; the modules' `USES` form one table."""
