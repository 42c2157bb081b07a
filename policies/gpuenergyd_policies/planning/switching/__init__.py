"""Clock changes: when to request them, plans with few of them, and the cost of late ones.

annealing     compiled kernels of the segment search
driver_queue  how long clock changes of several GPUs wait for each other
requests      when to request which clock
segments      plans with few clock changes
simulation    simulator of clock changes that take effect late
"""
