"""The OpenADR receiver: a process without rights that polls a grid operator's server and writes a file of events."""
