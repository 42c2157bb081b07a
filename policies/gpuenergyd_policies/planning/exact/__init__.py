"""The exact time-energy frontier: tables, flow network, sweep and certificate.

certificate    lower bounds by duality
network        the dependency graph as an integer flow network
sweep          the parametric flow that walks the frontier
sweep_kernels  compiled kernels of the sweep
tables         the profile as arrays: Pareto sets and hulls
"""
