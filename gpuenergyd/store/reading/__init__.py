"""Queries and job summaries.

carbon_queries    intensities, forecasts and targets
energy_sums       energy by job, GPU, host or hour
iterations        iterations of a job, single ones and blocks
queries           `History`, the public query interface
rollups           energy and power of GPUs per time bucket, and raw samples
stored_summaries  reads stored summaries, computes the others
summaries         the summary of one job
summary_inputs    the rows that summaries are computed from, for many jobs at once
time_range        the part of a job that a summary covers
"""
