"""Registration, wrapping and handles, shared by all adapters."""
