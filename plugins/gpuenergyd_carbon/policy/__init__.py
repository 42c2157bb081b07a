"""Carbon decisions: forecasts of intensities, and where to spend a slowdown budget."""
