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
judging      what given clocks really take and cost
inflight     how far each stage of 1F1B runs ahead, chosen together with the clocks
any_order    bounds for any order of forwards and backwards
segments     plans with few clock changes
replicas     unequal replicas' frontiers, added up
envpipe      EnvPipe's planner, as a baseline
compiled     compiled kernels with numba, the same code without
switching    when to ask for which clock, and what late clocks do
driver_queue how long changes of several GPUs wait for each other
"""
