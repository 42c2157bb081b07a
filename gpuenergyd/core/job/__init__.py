"""The life of one job: a pure state machine and its parts.

description        description of a job, and its ranks
faults             fault counts of a job's plans
full_speed_blocks  blocks of full-speed iterations for proof and relief
guard              slowdown guard: compares a plan with the baseline
history            the iterations that a job keeps
issued_plans       the plans of a job, by epoch and first iteration
job                the state machine: events in, commands out
knowledge          measurements of a job: plans, iterations, gauges
measured_frontier  the time-energy points that a job has run at
messages           events and commands
plan_control       changes of the plan in force, with leases and blocks
policy_question    state of a question to the policy
rank_reports       assembles whole iterations from the ranks' reports
recovery           baseline and profile after a fall-back
rules              limits and waiting times
savings            baseline and measured saving, with an interval
snapshot           snapshot of a job for the next daemon
story              notices, and a story of events for debugging
"""
