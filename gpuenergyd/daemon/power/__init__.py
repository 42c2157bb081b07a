"""The host's power budget: settings, schedule and requests, targets of jobs, and ceilings of GPUs."""
