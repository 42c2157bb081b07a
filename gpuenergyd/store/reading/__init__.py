"""Reading the history: queries, summaries, and readers for SQLite and SQLAlchemy.

carbon_queries  intensities, forecasts and targets
energy_sums     energy by job, GPU or hour
iterations      iterations of a job, single ones and blocks
job_inputs      rows that job summaries are computed from, for many jobs at once
kept_figures    stored job summaries
queries         what can be asked of the history
summaries       one job in figures
"""
