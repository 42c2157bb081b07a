"""`gpuenergyd demo`: the whole loop on simulated GPUs.

command         `demo`: the whole loop on simulated GPUs
folder_cleanup  removes the folder of a killed demo
grid            a replayed or synthetic grid for it
processes       its daemon and training processes
progress        what it shows while it runs
synthetic_grid  hourly intensities from a seed
with_parent     runs a module that ends with its parent
"""
