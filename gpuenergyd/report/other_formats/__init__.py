"""A job in formats of other tools: a trace for Perfetto, SPDX for bills of materials."""
