"""The console entry: every error becomes one line on stderr and an exit code, never a traceback."""

import os
import sys
import traceback
from collections.abc import Callable

from gpuenergyd.cli.commands.plain_arguments import plain_report
from gpuenergyd.cli.commands.report_output import write_report
from gpuenergyd.errors import GpuEnergyError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DEGRADED = 4
EXIT_INTERRUPTED = 130
DEBUG_VARIABLE = "GPUENERGYD_DEBUG"


def main() -> None:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        request = plain_report(arguments)
        return write_report(request) if request is not None else _run_typer(arguments)
    except GpuEnergyError as error:
        _show_traceback_if_wanted()
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has left: nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001  the last edge: a user gets one line, a developer asks for more
        _show_traceback_if_wanted()
        _complain(f"{type(error).__name__}: {error} (this is a bug; {DEBUG_VARIABLE}=1 shows where)")
        return EXIT_FAILED


def _run_typer(arguments: list[str]) -> int:
    """Run one command as Typer reads its arguments."""
    try:
        import typer  # noqa: PLC0415  a plain install brings the client only, and shall say so

        from gpuenergyd.cli.app import command_line  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("gpuenergyd"):
            raise
        _complain(f"the command line needs {error.name!r}: pip install 'gpuenergyd[daemon]'")
        return EXIT_FAILED
    click_error: type[Exception] = typer.BadParameter.mro()[2]  # ClickException, which Typer itself does not export
    try:
        result = command_line(arguments)(arguments, prog_name="gpuenergyd", standalone_mode=False)
    except click_error as error:
        return _usage_error(error)
    except typer.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _usage_error(error: Exception) -> int:
    """Print what was wrong with the arguments and where to read what is right."""
    describe: Callable[[], str] = getattr(error, "format_message", error.__str__)
    message = describe()
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help itself
        print(message)  # noqa: T201  the help is what was asked for
        return EXIT_USAGE
    command = context.command_path if context is not None else "gpuenergyd"
    _complain(f"{message.rstrip('.')}; see '{command} --help'")
    return EXIT_USAGE


def _complain(message: str) -> None:
    print("gpuenergyd:", " ".join(message.split()), file=sys.stderr)  # noqa: T201  the command line's own voice


def _show_traceback_if_wanted() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()


if __name__ == "__main__":
    main()
