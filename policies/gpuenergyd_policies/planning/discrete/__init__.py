"""Plans with supported clocks: rounding and refinement.

refinement        improvement of a plan, window by window
rounding          continuous durations to supported clocks, within the deadline
rounding_kernels  kernel of rounding
window_kernels    kernels of refinement
"""
