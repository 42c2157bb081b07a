"""Bytes to messages and back, no sockets.

messages       what travels between a training process and the core, as frozen values (standard library)
client_codec   the same for the training process: standard library only
daemon_codec   the same for the daemon: msgspec, strict, size-limited
clock_request  the fixed-size datagram that requests a clock inside an iteration
part_messages  what is said of a pipeline across hosts
profile_files  profile tables (profile_csv) and planner instances (instance_json) as files; their
               checked_values
"""

PROTOCOL_VERSION = 1
MAX_CONTROL_MESSAGE_BYTES = 65_536
MAX_ITERATION_REPORT_BYTES = 1_048_576
MAX_STRING_CHARS = 256
