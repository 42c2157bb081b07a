"""Jobs: running their state machines, delivering plans and clocks.

audit_log           who changed a job's control, and why
clock_requests      which clock requests reach the worker
executor            executes commands, each through its own port
iteration_observer  matches reported iterations with GPU samples
iteration_recorder  records iterations
leases              GPU leases of a job: acquire, suspend while it is idle, release
plan_delivery       what each rank still has to receive of the plans
plan_source         sources of plans: policy host, prediction, pipeline leader
previous_runs       previous runs of a job, in the history database
registry            registration, reports, and how jobs end
replicas            replicas of one training among this daemon's jobs
runner              feeds one job's state machine and queues its commands
sessions            registered training processes, by token and pidfd
"""
