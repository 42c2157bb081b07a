"""`gpuenergyd plan` and `gpuenergyd explain`: the offline planner."""
