"""Decisions: which clocks, and what performance is owed. Plugins of gpuenergyd, found by entry point like anybody's.

bubble_aware  the default: profiles while the job runs, plans on the exact frontier, corrects what it measures
envelope      EnvPipe's policy
uniform       one clock for all GPUs
full_speed    leaves every GPU as it is
steady        the same slowdown at every hour: the default target
carbon_target  follows the grid, within the job's slowdown budget

observed_pipeline  the dependency graph of a job as its iterations show it
planning      the exact time-energy frontier of a pipeline, rounded to real clocks
profiling     from a running job to its profile
carbon        forecasts, and where to spend a slowdown budget
trials        trying one clock on all GPUs of a job
would_be      what would be saved where nobody may set clocks, by assumed_curves
"""
