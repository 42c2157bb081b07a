"""`gpuenergyd plan` and `gpuenergyd explain`: the offline planner.

command  `plan`: the offline planner
explain  `explain`: why each instruction runs at its clock
inputs   from a file and options to a planner's request
"""
