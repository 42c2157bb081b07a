"""The life of one job: a pure state machine and its parts.

control       plans in force, full-speed blocks, questions to the policy, faults and recovery
description   description of a job, and its ranks
guard         slowdown guard: compares a plan with the baseline
issued_plans  the plans of a job, by epoch and first iteration
job           the state machine: events in, commands out
measurements  what a job's iterations showed: baseline, savings, profile
messages      events and commands
rules         limits and waiting times
snapshot      snapshot of a job for the next daemon
story         notices, and a story of events for debugging
"""
