"""Measurements: from samples and reported intervals to observed iterations and attributed energy.

attribution  splits each GPU's energy by second and by owner
merge        merges the observations of single ranks into one of the whole pipeline
observation  observation of one iteration: instruction times by clock, energy per GPU
telemetry    clock histories, energy counters and the observation of an iteration
"""
