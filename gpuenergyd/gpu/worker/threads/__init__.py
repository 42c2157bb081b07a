"""The driver threads of the worker, and the computations on their readings.

actuator            the thread that changes GPUs
clock_settling      settling time of clock changes
counter_edges       update instants of energy counters
driver_thread       base of both threads: can be abandoned when a driver call hangs
driver_threads      supervision of actuator and sampler: replaces one that is stuck
sample_stream       batches samples for the daemon, and detects foreign clock changes
sampler             the thread that reads GPUs
xid_watch           the thread that waits for critical GPU errors (Xid)
"""
