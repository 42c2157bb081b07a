"""The command line: thin, for people and for scripts.

main          the console entry: every error becomes one line and an exit code
app           the commands, by name
command_tree  every command with its options, for manual pages and the reference
manual_pages  what `man gpuenergyd` shows
output        how commands print: JSON for scripts, tables for people
serve         run the daemon
status        what the daemon is doing now
report        what it has done
plan          plan a pipeline from tables, without a daemon
explain       why each instruction runs at its clock
carbon        what the grid emits, what comes, and what following it is worth
policies      what is installed
restore       put every journalled GPU back
demo          the whole loop on simulated GPUs
versions      what `--version` says
settings_text every setting with its explanation
"""
