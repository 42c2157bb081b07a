"""Carbon intensities, accounts and the slowdown budget.

account           emissions saved by running slower and by choosing hours
grid_clock        clock of the grid: real time or a replayed trace
intensity         intensities, forecasts and grams
replay            requests and results of replays, forecasts and timing values
skill             live skill of this host's forecasts
slowdown_account  slowdown budget of a job and its use
speed_curve       power over speed of a frontier
"""
