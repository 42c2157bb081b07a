"""`gpuenergyd demo`: train a small GPT on simulated GPUs and report the saving.

command         the command: starts daemon and training, waits, reports
folder_cleanup  helper process that removes the temporary folder of a killed demo
grid            daemon settings for a replayed or synthetic carbon trace
processes       child processes of the demo
progress        live view or log lines while the demo runs
with_parent     runs a module that is terminated when its parent dies
"""
