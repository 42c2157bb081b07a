"""Clock changes: timing of requests, plans with few changes, and the cost of late clocks.

annealing     kernels of the segment search
driver_queue  waits of clock changes for the driver, which sets one GPU at a time
requests      timing of clock requests
segments      plans with few clock changes
simulation    simulator of iterations with late clocks
"""
