"""Measurements: from samples and reported intervals to observed iterations and attributed energy.

attribution  splits each GPU's energy by second and by owner
merge        one iteration of a pipeline across hosts, from what each host observed
observation  what one iteration showed: durations at clocks, energy per GPU
telemetry    samples, counters and what an iteration cost
"""
