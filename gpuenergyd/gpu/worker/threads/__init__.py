"""The worker's driver threads, and what they compute on.

actuator            the thread that changes GPUs
clock_settling      when a clock that was set takes effect
counter_edges       the instants at which an energy counter is updated
driver_thread       a watched thread whose driver call may never return
driver_threads      the setting and the reading thread, replaced when stuck
foreign_locks       detects clock locks that another program released
journalled_changes  journals a GPU's state right before its first change
sampler             the thread that reads GPUs
xid_watch           the thread that waits for critical GPU errors (Xid)
"""
