"""Conversion of bytes to messages and files to pipelines; no sockets.

client_codec       messages to JSON and back in the training process (standard library)
clock_request      encoding of the clock-request datagram
daemon_codec       messages to JSON and back in the daemon (msgspec): strict types, size limits
instance_json      planner instances: a whole pipeline as JSON
messages           messages between a training process and the daemon
pipeline_messages  messages of pipelines across hosts
profile_csv        profile tables: times and energies by clock as CSV
profile_files      reads profile tables and planner instances from files
values             validation of numbers in files
"""

PROTOCOL_VERSION = 1
MAX_CONTROL_MESSAGE_BYTES = 65_536
MAX_ITERATION_REPORT_BYTES = 1_048_576
MAX_STRING_CHARS = 256
