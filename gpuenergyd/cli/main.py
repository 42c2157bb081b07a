"""Console entry point: every error becomes one line on stderr and an exit code, never a traceback.

`run` and `--version` need the standard library only, so that a plain install in a training environment has them. Every
other command needs an extra of the distribution.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable

from gpuenergyd.cli.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from gpuenergyd.errors import GpuEnergyError

DEBUG_VARIABLE = "GPUENERGYD_DEBUG"


def main() -> None:
    """Run the command line and exit the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        return _run_command(arguments)
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
        _print_error(_missing_package(error) or _bug(error))
        return EXIT_FAILED


def _run_command(arguments: list[str]) -> int:
    """Run one command; modules are imported only as needed."""
    match arguments:
        case ["run", *rest]:
            from gpuenergyd.cli.run.arguments import parse_run_arguments, print_run_help  # noqa: PLC0415
            from gpuenergyd.cli.run.program import run_program  # noqa: PLC0415

            run_request = parse_run_arguments(rest)
            return run_program(run_request) if run_request is not None else print_run_help()
        case ["--version", *_]:
            from gpuenergyd.cli.versions import print_versions  # noqa: PLC0415

            return print_versions()
        case ["help", "run"]:
            return _run_command(["run", "--help"])
        case _:
            return _run_with_typer(arguments)


def _run_with_typer(arguments: list[str]) -> int:
    """Run a command that is declared with Typer, whose parser is used only if the arguments are not plain."""
    import typer  # noqa: PLC0415  missing in a plain install

    from gpuenergyd.cli.app import command_line, plain_call, print_help  # noqa: PLC0415  imports Typer

    click_error: type[Exception] = typer.BadParameter.mro()[2]  # ClickException, which Typer itself does not export
    try:
        if arguments[:1] == ["help"]:
            return print_help(arguments[1:])
        if (call := plain_call(arguments)) is not None:
            return call()
        result = command_line()(arguments, prog_name="gpuenergyd", standalone_mode=False)
    except click_error as error:
        return _print_usage_error(error)
    except typer.Abort:
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


def _print_usage_error(error: Exception) -> int:
    """Print a usage error from Typer, with a pointer to the help of the command; return the exit code."""
    format_message: Callable[[], str] = getattr(error, "format_message", error.__str__)
    message = format_message().replace("Value error, ", "").replace("Input should be", "must be")  # pydantic's words
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help text
        print(message)  # noqa: T201  help belongs on stdout
        return EXIT_USAGE
    command = context.command_path if context is not None else "gpuenergyd"
    _print_error(f"{message.rstrip('.')}; see '{command} --help'")
    return EXIT_USAGE


def _print_error(message: str) -> None:
    print("gpuenergyd:", " ".join(message.split()), file=sys.stderr)  # noqa: T201  errors of commands go to stderr


def _missing_package(error: Exception) -> str | None:
    """Return the message for a dependency that is not installed, None for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name.startswith("gpuenergyd"):
        return None
    package = error.name.partition(".")[0]
    match _extra_with(package):
        case None:
            return f"this command needs {package!r}, which is not installed"
        case "daemon":
            only = "; without it, only `gpuenergyd run` and `gpuenergyd --version` work"
            return f"this command needs {package!r}: pip install 'gpuenergyd[daemon]'{only}"
        case extra:
            return f"this command needs {package!r}: pip install 'gpuenergyd[{extra}]'"


def _extra_with(package: str) -> str | None:
    """Return the smallest extra of this distribution that installs a package; None if no extra does."""
    from importlib.metadata import PackageNotFoundError, requires  # noqa: PLC0415  start fast

    try:
        requirements = requires("gpuenergyd") or []
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "daemon"
    found = [match.groups() for text in requirements if (match := re.match(r"([\w-]+).*extra == ['\"](\w+)", text))]
    sizes = Counter(extra for _, extra in found)
    return min(
        (extra for name, extra in found if name.replace("-", "_") == package), key=sizes.__getitem__, default=None
    )


def _bug(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:  # a full disk, a closed folder, a name too long
        return f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error} (this is a bug; set {DEBUG_VARIABLE}=1 for a traceback)"


def _print_traceback_if_debugging() -> None:
    if os.environ.get(DEBUG_VARIABLE):
        import traceback  # noqa: PLC0415  start fast

        traceback.print_exc()


if __name__ == "__main__":
    main()
