"""Exit codes of all commands; each error type has its own exit code, see `gpuenergyd.errors`."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 4
EXIT_INTERRUPTED = 130
