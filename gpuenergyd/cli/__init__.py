"""The command line: thin, for people and for scripts.

main      the console entry: every error becomes one line and an exit code
app       the commands, by name
output    how commands print: JSON for scripts, tables for people
serve     run the daemon
status    what the daemon is doing now
report    what it has done
plan      plan a pipeline from tables, without a daemon
explain   why each instruction runs at its clock
carbon    what the grid emits, what comes, and what following it is worth
policies  what is installed
restore   put every journalled GPU back
demo      the whole loop on simulated GPUs
"""
