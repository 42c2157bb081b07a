"""Timers for instructions on CUDA devices and on simulated GPUs.

cuda_events  a timer that uses CUDA events
simulated    a timer for simulated GPUs
"""
