"""`gpuenergyd carbon`: query, forecast and backtest grid carbon intensity.

command  `carbon now`, `carbon forecast` and `carbon backtest`
files    reads traces, frontiers and profiles; writes forecasts and choices
inputs   builds requests from the options; finds the forecaster and the backtest by entry point
plot     a forecast as bars in the terminal or as SVG
"""
