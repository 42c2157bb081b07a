"""The HTTP API and the clock socket."""
