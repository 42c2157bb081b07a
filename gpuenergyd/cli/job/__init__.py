"""Commands that change running jobs."""
