"""Online profiling: time and energy of each instruction at every clock, from a running job.

design        the clocks to measure
fit           time and energy at every clock from few samples
power         power per kind of instruction from the energy of iterations
previous_run  use of an earlier run's profile while it still holds
procedure     the next clocks to measure, and the end of profiling
regret        expected loss of a plan made from the current fit
rescaling     a changed job's earlier iterations, rescaled to its new times
residual      a Gaussian process on the residuals of the power model
times         instruction times at every clock from a few clocks
"""
