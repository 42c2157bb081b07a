"""Formats of binary columns.

compressed_json  timelines, plans, forecasts and frontiers as compressed JSON
series           samples and one-second rollups of one GPU, packed by minute
"""
