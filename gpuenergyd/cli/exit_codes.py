"""Exit codes of all commands; each error type carries its own, see `gpuenergyd.errors`."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 4
EXIT_INTERRUPTED = 130
