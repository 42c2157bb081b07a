"""Timers for instructions on CUDA devices and on simulated GPUs."""
