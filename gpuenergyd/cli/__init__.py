"""The command line.

app        the commands, by name
carbon     `gpuenergyd carbon`: query, forecast and backtest grid carbon intensity
commands   one file per command
demo       `gpuenergyd demo`: the whole loop on simulated GPUs
doctor     `gpuenergyd doctor`: diagnoses this host
help       help beyond `--help`: manual pages, settings, versions
install    `gpuenergyd install` and `uninstall`
json_text  values as one line of JSON
main       the console entry: one line and an exit code for every error
output     JSON for scripts, tables for people
plan       `gpuenergyd plan` and `gpuenergyd explain`: the offline planner
terminal   a terminal without colour when piped
"""
