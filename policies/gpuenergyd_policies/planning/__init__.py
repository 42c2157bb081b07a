"""The planner: the exact time-energy frontier of a pipeline, rounded to real clocks.

any_order        bounds for any order of forwards and backwards
compiled         compiled kernels with numba, the same code without
compression      very long 1F1B pipelines, planned from a short one
discrete         plans of clocks that exist: rounding and refinement
envpipe          envPipe's planner, as a baseline
exact            the exact time-energy frontier: tables, flow network, sweep and certificate
frontier         `solve` for one plan, `frontier` for many, each with a proven lower bound
inflight         how far each stage of 1F1B runs ahead, chosen together with the clocks
offline          the planner behind `gpuenergyd plan`
plan_evaluation  time and energy of given clocks on a graph
problem          one pipeline made ready for planning, and the steps of solving it
switching        clock changes: when to request them, few of them, and what late ones cost
"""
