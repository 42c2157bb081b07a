"""Runs the benchmarks, stores their results and renders the pages with their figures."""
