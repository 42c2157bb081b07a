"""Plans with supported clocks: rounding and refinement."""
