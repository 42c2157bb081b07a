"""Runs the benchmarks, keeps what they measured, writes docs/benchmarks.md from it: see `python -m benchmarks.report --help`.

`runs` lists them, `running` lets one run within its time, `results` is what is kept of it, `page` writes the page;
`line_counts` is what `make coverage` tells.
"""
