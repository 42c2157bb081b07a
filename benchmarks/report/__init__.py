"""Runs the benchmarks, stores their results and renders docs/benchmarks.md (`python -m benchmarks.report --help`).

runs     which benchmarks there are, with their arguments and time limits
running  runs one within its time limit
results  what is stored of a run
page     renders the page
"""
