"""Online profiling: from a running job to time and energy of each instruction at every clock.

design        which clocks to try
fit           time and energy at every clock from few samples
power         power per kind of instruction from the energy of iterations
previous_run  whether an earlier run's profile still holds
procedure     what to try next, and when to stop
regret        expected loss of a plan made from the current fit
rescaling     a changed job's earlier iterations, rescaled to its new pace
residual      a Gaussian process on what the power formula misses
times         durations at every clock from a few clocks
"""
