"""Control of a job: which plan is in force, and when the policy is asked for another."""
