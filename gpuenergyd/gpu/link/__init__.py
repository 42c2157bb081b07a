"""The link between the daemon and the GPU worker.

client    the daemon's end: a connection to the GPU worker
codec     encoding of messages as JSON datagrams, and strict decoding
messages  the messages between the daemon and the GPU worker
"""
