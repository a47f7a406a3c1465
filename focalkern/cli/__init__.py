"""The command ``focalkern``: calibrate logits, evaluate them, apply a saved calibrator, sweep over many networks."""

import argparse
import codecs
import contextlib
import importlib.util
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from focalkern._version import __version__
from focalkern.cli import apply, calibrate, card, demo, evaluate, info, sweep
from focalkern.cli._options import in_options
from focalkern.files import InputError

__all__ = ["main"]

_EXTRA = ("tabulate", "matplotlib", "jinja2")  # packages of the extra cli without which commands fail
# Handlers of unprintable characters in place of Python's two: the second is that of the C locale.
_HANDLERS = {"strict": "backslashreplace", "surrogateescape": "focalkern_names"}
_COMMANDS = (calibrate, evaluate, apply, card, sweep, demo, info)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line and refers to ``--help``.

    It takes no beginning of an option for the option: ``apply --labels`` would be ``--labels-key``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: the arguments without the program's name; None is ``sys.argv[1:]``.

    Returns:
        The exit code: 0; 2 after an error (a file, a value, a missing package), which is one line on stderr; 130 after
        Ctrl-C; 143 after SIGTERM.
    """
    # A character that the terminal lacks, or the bytes of a file name, must not end the command after its computation.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _HANDLERS:
        sys.stdout.reconfigure(errors=_HANDLERS[sys.stdout.errors])
    parser = _Parser(prog="focalkern", description="Calibrates trained classifiers and measures the result.")
    parser.add_argument("--version", action="version", version=f"focalkern {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for module in _COMMANDS:
        module.add_parser(commands)
    words = sys.argv[1:] if arguments is None else list(arguments)
    parsed, others = parser.parse_known_args(words)
    if others:
        command = f"focalkern {parsed.command or ''}".strip()
        parser.exit(2, f"{command}: unrecognized arguments: {' '.join(others)} (see {command} --help)\n")
    parsed.words = words
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        with _sigterm_as_ctrl_c():
            code: int = parsed.run(parsed)
        # sys.stdout is None if the shell has closed it (>&-); print then writes nothing.
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (InputError, ValueError) as problem:
        return _fail(parsed.command, in_options(problem))
    except ImportError as error:
        package = error.name or ""
        if package in _EXTRA:  # all at once, because the next one would be the next error
            missing = [name for name in _EXTRA if name == package or importlib.util.find_spec(name) is None]
            return _fail(parsed.command, f"{package} is needed for this: pip install {' '.join(missing)}")
        return _fail(parsed.command, str(error))
    except MemoryError:
        return _fail(parsed.command, "not enough memory")
    except BrokenPipeError:
        # The reader of a pipe has ended (head, less); Python would report this again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _fail(parsed.command, f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except _Terminated:
        return _fail(parsed.command, "terminated", code=128 + signal.SIGTERM)
    except KeyboardInterrupt:
        return _fail(parsed.command, "interrupted", code=130)


def _names(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a file name, as surrogateescape; other characters as backslashreplace."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error("focalkern_names", _names)


class _Terminated(KeyboardInterrupt):
    """SIGTERM as an exception, so that the cleanup of Ctrl-C also runs for it."""


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Context in which SIGTERM acts as Ctrl-C, except on ranks that write nothing: torchrun ends these while they wait
    outside of Python."""
    handler = signal.getsignal(signal.SIGTERM)
    of_main_thread = threading.current_thread() is threading.main_thread()
    if not of_main_thread or handler != signal.SIG_DFL or os.environ.get("RANK", "0") != "0":
        yield
        return

    def stop(_number: int, _frame: Any) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _fail(command: str, message: str, code: int = 2) -> int:
    print(f"focalkern {command}: {' '.join(message.split())}", file=sys.stderr)
    return code
