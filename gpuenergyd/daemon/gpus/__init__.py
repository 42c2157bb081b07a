"""GPUs as the daemon knows them: inventory, history and access.

access        who may have GPUs changed
history       what the history keeps of a GPU
host_energy   energy of processors and memory (powercap)
inventory     identity, health, requested and observed clocks of each GPU
proof_of_use  checks that a process really runs on a GPU
"""
