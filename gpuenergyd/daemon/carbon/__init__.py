"""Carbon intensity in the daemon: readings and forecasts, and the targets and slowdown budgets of jobs."""
