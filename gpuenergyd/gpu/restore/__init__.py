"""Restores: the journal of original GPU states, and putting them into effect again.

command   `gpuenergyd restore` without a worker
executor  restores GPUs from the journal
journal   the original state of each changed GPU, fsynced before the first change
policy    what an administrator configured about restores
"""
