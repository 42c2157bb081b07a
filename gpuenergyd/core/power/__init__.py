"""Power budgets: the one in force, readings against it, and the backstop that does not trust predictions."""
