"""Public test tools: Hypothesis strategies for meshes, specs, programs and plans, and `check_plan`."""
