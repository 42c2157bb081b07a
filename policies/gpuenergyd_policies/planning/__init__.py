"""The planner: the exact time-energy frontier of a pipeline, rounded to real clocks.

any_order        energy and time bounds over all orders of forwards and backwards
compiled         numba compilation of kernels, plain Python without numba
compression      plans for very long 1F1B pipelines from a short one
discrete         plans with supported clocks: rounding and refinement
envpipe          EnvPipe's planner, for comparison
exact            the exact time-energy frontier: tables, flow network, sweep and certificate
frontier         `solve` for one plan, `frontier` for many, each with a proven lower bound
inflight         extra in-flight microbatches of 1F1B, chosen together with the clocks
offline          the planner behind `gpuenergyd plan`
plan_evaluation  time and energy of given clocks on a graph
problem          one pipeline prepared for planning, and the steps of solving it
switching        clock requests, plans with few clock changes, and the cost of late clocks
"""
