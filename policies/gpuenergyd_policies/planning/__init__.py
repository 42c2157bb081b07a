"""The planner: the exact time-energy frontier of a pipeline, rounded to real clocks."""
