"""GPUs: reading them, controlling them, and making sure that they come back.

device     the Protocols: reading and controlling are two rights
simulated  GPUs that exist as a model in a file that daemon and training processes share
journal    what to restore, on disk before the first change
worker     the privileged process: the only one that changes a GPU
link       the core's side of the worker
"""
