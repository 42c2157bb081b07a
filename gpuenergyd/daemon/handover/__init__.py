"""Hand-over of running jobs from one daemon to the next, when it restarts."""
