"""Registration, wrapping and handles, shared by all adapters.

handle        the handle that `attach` returns, and wrapped methods
membership    joining a pipeline rank, on one host or across hosts
ordered_rank  a rank whose instruction order is learned and checked
"""
