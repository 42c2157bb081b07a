"""Plugin `carbon_lab`: queries and forecasts grid carbon intensity, and replays past traces."""

from gpuenergyd.cli.command_entry import CommandEntry

CARBON = CommandEntry("Plan", "gpuenergyd_carbon.command", "Query, forecast and backtest grid carbon intensity.")
