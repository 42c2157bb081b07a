"""`gpuenergyd plan` and `gpuenergyd explain`: the offline planner.

command  `plan`: computes a plan and prints it
explain  `explain`: why each instruction runs at its clock
inputs   builds a planner's request from a file and the options
"""
