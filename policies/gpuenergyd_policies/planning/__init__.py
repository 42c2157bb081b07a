"""Which clock for which instruction: the exact time-energy frontier of a pipeline, rounded to real clocks.

frontier     the door: `solve` for one plan, `frontier` for many, each with a proven lower bound
offline      the same for `gpuenergyd plan`
compression  very long 1F1B pipelines, planned from a short one
problem      one pipeline made ready, and the steps of solving it
tables       the profile as arrays: Pareto sets and hulls
network      the dependency graph as an integer flow network
sweep        the parametric flow that walks the frontier
certificate  lower bounds by duality
rounding     continuous durations -> clocks that exist, never late
refinement   better clocks, window by window
compiled     compiled kernels with numba, the same code without
switching    when to ask for which clock, and what late clocks do
driver_queue how long changes of several GPUs wait for each other
"""
