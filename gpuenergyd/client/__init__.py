"""What lives inside a training process: the standard library only, and never in the way of a step.

environment  where the daemon, the run and the GPU are, from arguments and the environment
exchange     one HTTP request and its reply, lean enough for a training process
connection   a connection to the daemon's Unix socket, and the control client of the command line
breaker      when to leave a silent daemon alone
recorder     when each instruction began and ended, in preallocated memory
plans        plan slices as the training thread follows them, on one host and across hosts
reporter     the background thread that registers, reports and fetches plans
rank         one rank of a job, as trainer adapters see it
loop         `gpuenergyd.job` for plain training loops
tags, length  whose run it is and how long it will be, as the environment says
"""
