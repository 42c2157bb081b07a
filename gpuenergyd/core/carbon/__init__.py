"""Carbon: intensities, accounts and the slowdown budget.

account           grams saved by running slower and by choosing hours
grid_clock        the hour of the grid: now, or an hour of a replayed trace
intensity         intensities, forecasts and grams
replay            request and result of replaying past traces
skill             how good this host's forecasts were
slowdown_account  a job's slowdown budget and what is left of it
speed_curve       power over speed: the points worth running or mixing
"""
