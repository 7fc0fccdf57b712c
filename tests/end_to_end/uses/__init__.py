"""Uses that demanding users tried, one module for each kind; `test_uses` joins the modules' `USES` to one table."""
