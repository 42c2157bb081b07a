"""The life of one job: a pure state machine and what it consists of.

description        what a job is, as its first rank declared it
faults             failures of a job's plans, and when to retry
guard              compares a plan with the baseline, whatever its policy expects
history            the iterations that a job keeps
issued_plans       the plans of a job, by epoch and first iteration
job                the state machine: events in, commands out
measured_frontier  the time-energy points that a job has run at
messages           its events and commands
rank_reports       from single ranks' reports to whole iterations
rules              its limits and waiting times
savings            baseline and measured saving, with an interval
"""
