"""`gpuenergyd carbon`: query, forecast and backtest grid carbon intensity.

command  `carbon now`, `forecast` and `backtest`
files    trace, frontier and profile files
inputs   from options to requests
plot     a forecast as a picture
"""
