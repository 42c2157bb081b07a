"""The command line.

app         all commands by name, grouped by task, each imported only when needed
carbon      `gpuenergyd carbon`: query, forecast and backtest grid carbon intensity
commands    the commands that fit into a file or two each
demo        `gpuenergyd demo`: train on simulated GPUs and report the saving
doctor      `gpuenergyd doctor`: diagnose this host and suggest fixes
exit_codes  exit codes of all commands
help        manual pages and the reference, generated from the command line and the settings
install     `gpuenergyd install` and `gpuenergyd uninstall`
main        console entry point: turns every error into one line and an exit code
options     options that several commands share
output      JSON for scripts, a Rich console for people
plan        `gpuenergyd plan` and `gpuenergyd explain`: the offline planner
versions    `gpuenergyd --version`
"""
