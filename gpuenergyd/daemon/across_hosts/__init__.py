"""Pipelines across hosts: members on this host, and planning by the leader for the whole pipeline.

leader_ports     ports of a leader's command executor
pipeline_leader  runs the state machine of a pipeline across hosts
pipeline_member  state and posted plans of members on this host
validation       validation of members' reports and posted plans
"""
