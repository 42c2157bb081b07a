"""Conversion of bytes to messages and files to pipelines; no sockets."""

PROTOCOL_VERSION = 1
MAX_CONTROL_MESSAGE_BYTES = 65_536
MAX_ITERATION_REPORT_BYTES = 1_048_576
MAX_STRING_CHARS = 256
