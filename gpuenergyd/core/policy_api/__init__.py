"""The plugin API that a policy author reads: Protocols, views and targets.

policy        the Protocols of policies and the frozen views they get
previous_run  what one run of a job leaves for the next
target        the iteration time that a job may take
"""
