"""Runs the benchmarks, stores their results and renders the pages with figures (`python -m benchmarks.report --help`)."""
