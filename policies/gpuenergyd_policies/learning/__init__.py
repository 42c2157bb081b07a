"""Prior over time and power curves, and the posterior that a job's own planned iterations make of it."""
