"""From a running job to its profile.

design  which clocks to try, so that few iterations tell forward and backward apart
times   from those iterations to time at every clock
fit     from those iterations to energy at every clock
"""
