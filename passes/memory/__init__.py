"""Memory of programs: lifetimes and bytes of values under each plan, and the peak of a lowered program or pipeline."""
