"""`gpuenergyd carbon`: query, forecast and backtest grid carbon intensity."""
