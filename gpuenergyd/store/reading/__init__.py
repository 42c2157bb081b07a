"""Reading the history: queries, summaries, and readers for SQLite and SQLAlchemy.

carbon_queries     intensities, forecasts and targets
energy_sums        energy by job, GPU or hour
iterations         iterations of a job, single ones and blocks
job_inputs         rows that job summaries are computed from, for many jobs at once
kept_figures       stored job summaries
queries            what can be asked of the history
sqlalchemy_reader  reads any other history through SQLAlchemy
sqlite_reader      reads an SQLite history without SQLAlchemy
summaries          one job in figures
"""
