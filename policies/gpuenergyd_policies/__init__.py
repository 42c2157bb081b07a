"""Decisions: which clocks to set, and which iteration time a job may take. Plugins, found by entry point.

assumed_curves     time and power where no clock may be tried, from published curves
bubble_aware       the default policy: profiles each stage online, then slows down what is off the critical path
carbon             carbon decisions: forecasts of intensities, and where to spend a slowdown budget
envelope           envPipe's policy
full_speed         leaves every GPU as it is
observed_pipeline  the dependency graph of a job as its iterations show it
planning           the planner: the exact time-energy frontier of a pipeline, rounded to real clocks
predicted_savings  predicted savings where clocks may not be set
profiling          online profiling: from a running job to time and energy of each instruction at every clock
targets            target policies: a constant slowdown, and one that follows the grid
uniform            one clock for all GPUs
uniform_probe      a plan with one clock on all GPUs, and what it showed
"""
