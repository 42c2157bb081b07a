"""Plans with supported clocks: rounding and refinement.

refinement        improves clocks window by window
rounding          rounds continuous durations to supported clocks, never late
rounding_kernels  compiled kernel of rounding
window_kernels    compiled kernels of refinement
"""
