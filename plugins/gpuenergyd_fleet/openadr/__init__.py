"""The OpenADR receiver: an unprivileged process that polls a grid operator's server and writes a file of events."""
