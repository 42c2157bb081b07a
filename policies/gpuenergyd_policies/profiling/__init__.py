"""Online profiling: time and energy of each instruction at every clock, from a running job."""
