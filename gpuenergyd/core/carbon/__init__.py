"""Carbon intensities, accounts and the slowdown budget."""
