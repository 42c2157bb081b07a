"""Packed columns of the history.

blobs   spans and plans as compressed JSON
series  samples and seconds of one GPU, packed a minute at a time
"""
