"""Console entry point: every error becomes one line on stderr and an exit code, never a traceback."""

import os
import sys
import traceback
from collections.abc import Callable

from gpuenergyd.cli.commands.report_arguments import parse_report_arguments
from gpuenergyd.cli.commands.report_output import write_report
from gpuenergyd.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from gpuenergyd.errors import GpuEnergyError

DEBUG_VARIABLE = "GPUENERGYD_DEBUG"


def main() -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        request = parse_report_arguments(arguments)
        return write_report(request) if request is not None else _run_with_typer(arguments)
    except GpuEnergyError as error:
        _print_traceback_if_debugging()
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output (`| head`) has exited; Python must not fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001  last resort: users see one line, developers can request the traceback
        _print_traceback_if_debugging()
        _print_error(f"{type(error).__name__}: {error} (this is a bug; set {DEBUG_VARIABLE}=1 for a traceback)")
        return EXIT_FAILED


def _run_with_typer(arguments: list[str]) -> int:
    """Parse the arguments with Typer and run the command."""
    try:
        import typer  # noqa: PLC0415  missing in a plain install, which is reported below

        from gpuenergyd.cli.app import command_line  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpuenergyd"):
            raise
        _print_error(f"the command line needs {error.name!r}: pip install 'gpuenergyd[daemon]'")
        return EXIT_FAILED
    click_error: type[Exception] = typer.BadParameter.mro()[2]  # ClickException, which Typer itself does not export
    try:
        result = command_line(arguments)(arguments, prog_name="gpuenergyd", standalone_mode=False)
    except click_error as error:
        return _print_usage_error(error)
    except typer.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _print_usage_error(error: Exception) -> int:
    """Print a usage error of Typer's with a pointer to the command's help; return the exit code."""
    format_message: Callable[[], str] = getattr(error, "format_message", error.__str__)
    message = format_message()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
        print(message)  # noqa: T201  help belongs on stdout
        return EXIT_USAGE
    command = context.command_path if context is not None else "gpuenergyd"
    _print_error(f"{message.rstrip('.')}; see '{command} --help'")
    return EXIT_USAGE


def _print_error(message: str) -> None:
    print("gpuenergyd:", " ".join(message.split()), file=sys.stderr)  # noqa: T201  errors of commands go to stderr


def _print_traceback_if_debugging() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()


if __name__ == "__main__":
    main()
