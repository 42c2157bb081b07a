"""Clock changes: when to request them, few of them, and what late ones cost.

driver_queue  how long clock changes of several GPUs wait for each other
requests      when to request which clock, and a simulator of late clocks
segments      plans with few clock changes
"""
