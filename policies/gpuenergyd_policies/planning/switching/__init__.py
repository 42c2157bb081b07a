"""Clock changes: timing of requests, plans with few changes, and the cost of late clocks."""
