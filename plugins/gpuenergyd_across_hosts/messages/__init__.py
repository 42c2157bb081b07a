"""Messages of pipelines across hosts."""
