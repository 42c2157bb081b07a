"""Policies: plugins that decide clocks and iteration time targets, found by entry point.

assumed_curves     profiles extrapolated by published curves, where clocks may not be set
bubble_aware       the default policy: profiles online, slows down instructions off the critical path
carbon             forecasts of carbon intensity, and optimal spending of a slowdown budget
envelope           the policy of EnvPipe, for comparison
full_speed         keeps the default clocks
observed_pipeline  the dependency graph of a job with its measured latencies
planning           the planner: the exact time-energy frontier of a pipeline, rounded to real clocks
predicted_savings  predicted plans and savings, where clocks may not be set
profiling          online profiling: time and energy of each instruction at every clock
targets            target policies: a constant slowdown, and one that follows the grid
uniform            one clock for all GPUs
uniform_probe      plans with one clock on all GPUs, and their measurements
"""
