"""GPUs: reading, controlling and restoring them.

device            the driver Protocols: reading and controlling are separate
drivers           GPU drivers: NVML and the simulated one
link              the link between the daemon and the GPU worker
process_identity  identification of processes and boots
restore           the journal of original GPU states, and restoring them
worker            the GPU worker: the only privileged process, and the only one that changes GPUs
"""
