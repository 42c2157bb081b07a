"""What lives inside a training process: the standard library only, and never in the way of a step.

environment  where the daemon, the run and the GPU are, from arguments and the environment
exchange     one HTTP request and its reply, lean enough for a training process
connection   a connection to the daemon's Unix socket, and the control client of the command line
breaker      when to leave a silent daemon alone
recorder     when each instruction began and ended, in preallocated memory
following    plan slices as a training thread follows them
reporter     the background thread that registers, reports and fetches plans
rank         one rank of a job, as trainer adapters see it
loop         `gpuenergyd.job` for plain training loops
agreed_plans  plans of a pipeline across hosts, followed where all its ranks have agreed
tags, length  whose run it is and how long it will be, as the environment says
"""
