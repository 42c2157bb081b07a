"""The link between the daemon and the GPU worker.

client    the daemon's side of the GPU worker
messages  what the daemon and the GPU worker send each other
queries   the driver queries that the daemon may send
"""
