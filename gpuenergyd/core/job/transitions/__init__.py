"""Transitions of a job, one function per event; `gpuenergyd.core.job.job` lists them."""
