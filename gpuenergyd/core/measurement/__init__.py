"""Measurements: from samples and reported intervals to observed iterations and attributed energy."""
