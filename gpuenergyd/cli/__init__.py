"""The command line: thin, for people and for scripts.

main          the console entry: every error becomes one line and an exit code
app           the commands, by name
command_tree  every command with its options, for manual pages and the reference
manual_pages  what `man gpuenergyd` shows
output        how commands print: JSON for scripts (json_text), tables for people (terminal)

serve         run the daemon
status        what the daemon is doing now; dashboard, the same as a page by dashboard_server
report        what it has done: report_command, with plain_arguments so that it starts fast
plan          plan a pipeline from tables, without a daemon; plan_inputs
explain       why each instruction runs at its clock
carbon        what the grid emits, what comes, and what following it is worth: carbon_files, carbon_inputs, carbon_plot
policies      what is installed
run           a program that was not changed, joined
leases        `lock` and `limit`: an administrator's wishes
restore       put every journalled GPU back
doctor        what on this host stops the daemon from working: host_facts
install       units, users and folders, and back: installation
otlp          the metrics to an OpenTelemetry collector
demo          the whole loop on simulated GPUs: demo_processes, demo_progress, on demo_grid with a synthetic_grid,
              with_parent and folder_keeper so that nothing is left of one that was killed
versions      what `--version` says
settings_text  every setting with its explanation
"""
