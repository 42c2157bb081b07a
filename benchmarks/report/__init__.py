"""Runs the benchmarks, stores their results and renders docs/benchmarks.md (`python -m benchmarks.report --help`).

runs     the benchmarks with their arguments and time limits
running  runs a benchmark within its time limit
results  stores and reads results
page     renders the page
"""
