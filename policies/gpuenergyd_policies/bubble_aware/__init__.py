"""The default policy: profiles each stage online, then slows down what is off the critical path.

model   the dependency graph of a job as its iterations show it
policy  the decision after each iteration
"""
