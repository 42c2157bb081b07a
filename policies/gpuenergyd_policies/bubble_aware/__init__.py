"""The default policy: profiles each stage online, then slows down what is off the critical path.

policy  the decision after each iteration
"""
