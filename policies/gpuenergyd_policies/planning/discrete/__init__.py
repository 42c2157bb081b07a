"""Plans of clocks that exist: rounding and refinement.

refinement  better clocks, window by window
rounding    continuous durations to clocks that exist, never late
"""
