"""Client inside a training process: standard library only, and never blocks or fails a step.

connection   HTTP connection to the daemon's Unix socket, and the client of the command line
environment  defaults from the environment: socket, run key, rank, GPU, length of the job
loop         `gpuenergyd.job` for plain training loops
plans        plan slices as the training thread follows them, on one host and across hosts
rank         client of one rank of a job, used by trainer adapters
recorder     recorder of instruction begins and ends in preallocated memory
reporter     background thread that registers, reports iterations and receives plans
tags         tags of a run from the environment and the training program
"""
