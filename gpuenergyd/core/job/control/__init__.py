"""Control of a job: which plan is in force, and when the policy is asked for another.

faults             fault counts of a job's plans
full_speed_blocks  blocks of full-speed iterations for proof and relief
plan_control       changes of the plan in force, with leases and blocks
policy_question    state of a question to the policy
recovery           baseline and profile after a fall-back
"""
