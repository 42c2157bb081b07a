"""Instruction times: CUDA events and simulated GPUs.

cuda_events  instruction times from CUDA events
simulated    instruction times of simulated GPUs
"""
