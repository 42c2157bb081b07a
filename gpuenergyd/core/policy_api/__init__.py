"""The plugin API for policy authors: Protocols, views and targets.

policy        the Protocols of policies, and the frozen views and results that they exchange
previous_run  iterations of a previous run of the same job
target        iteration time targets
"""
