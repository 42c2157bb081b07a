"""Conversion of bytes to messages and of files to pipelines; no sockets."""

PROTOCOL_VERSION = 1
MAX_CONTROL_MESSAGE_BYTES = 65_536
MAX_ITERATION_REPORT_BYTES = 1_048_576
MAX_REPORTS = 64
"""Most iteration reports in one message."""
MAX_REPLY_BYTES = 4_194_304
MAX_STRING_CHARS = 256
