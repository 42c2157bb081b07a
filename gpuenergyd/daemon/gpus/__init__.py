"""GPUs of this host: identity, state, energy records, and the rights of processes to change them.

access        control and administration rights of client processes
history       database records from a GPU's samples
host_energy   energy of CPU packages and memory (powercap)
inventory     identity, health, requested and observed clocks of each GPU
proof_of_use  checks that a client's job runs on a GPU before it may change it
"""
