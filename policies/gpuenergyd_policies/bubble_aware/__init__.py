"""The default policy: profiles each stage online, then slows down instructions off the critical path.

correction  corrections of a tuned plan from its measured iterations
model       the fitted model of a job's pipeline
planning    tuned plans from a model of the pipeline
policy      the policy: the plan after each iteration
tuning      the policy's constants, with their units and reasons
"""
