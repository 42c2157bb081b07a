"""GPUs: reading, controlling and restoring them.

device            the Protocols: reading and controlling are separate rights
drivers           GPU drivers: NVML and the simulated one
link              the link between the daemon and the GPU worker
process_identity  identifies processes and boots; a pid alone is reused
restore           restores: the journal of original GPU states, and putting them into effect again
worker            the GPU worker: the only privileged process, and the only one that changes GPUs
"""
