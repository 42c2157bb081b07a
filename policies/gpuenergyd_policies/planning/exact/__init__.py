"""The exact time-energy frontier: tables, flow network, sweep and certificate.

certificate    lower bounds by LP duality
network        the dependency graph as an integer flow network
sweep          the frontier as a parametric minimum-cost flow
sweep_kernels  kernels of the sweep
tables         the profile as arrays: Pareto sets and hulls
"""
