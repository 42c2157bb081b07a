"""Jobs: running their state machines, delivering plans and clocks, handing over on a restart.

audit_log           who changed a job's control, and why
clock_requests      which clock requests reach the worker
handover            passes running jobs to the restarted daemon
handover_file       the file it passes them in
iteration_observer  matches reported iterations with GPU samples
leases              GPU leases of a job: acquire, suspend while it is idle, release
plan_delivery       what each rank still has to receive of the plans
previous_runs       earlier runs of a job, looked up in the history
registry            registration, reports, and how jobs end
replicas            replicas of one training among this daemon's jobs
runner              feeds one job's state machine and executes its commands
sessions            registered training processes, by token and pidfd
"""
