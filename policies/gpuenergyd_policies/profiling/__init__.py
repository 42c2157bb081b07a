"""From a running job to its profile.

design  which clocks to try, so that few iterations tell forward and backward apart
fit     from those iterations to time and energy at every clock
"""
