"""Where the command line speaks: results on standard output, everything else on standard error."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

from rich.console import Console
from rich.logging import RichHandler

from pibroch.errors import PibrochError


class _EscapingFormatter(logging.Formatter):
    """Writes log records without the control characters of names that strangers chose."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


console = Console(stderr=True)
results = Console(highlight=False, soft_wrap=True)


def set_up_logging() -> None:
    """Send the library's log to standard error: with colours on a terminal, with times elsewhere.

    Rank 1 and those behind it write into files: no colours, no moving lines. What the terminal's
    encoding cannot show is escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a forked process has a pipe where its parent's file was, and asks for its place
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    has_log = os.environ.get("RANK", "0") != "0"
    console.__init__(stderr=True, force_terminal=False if has_log else None)  # type: ignore[misc]  # forked ranks have the launcher's
    handler: logging.Handler
    if console.is_terminal:
        handler = RichHandler(console=console, show_time=False, show_path=False, show_level=False)
        handler.setFormatter(_EscapingFormatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_EscapingFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("pibroch")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)


def escaped(text: str) -> str:
    r"""Text for a terminal, whose control characters, but newlines and tabs, become their names.

    >>> print(escaped("a\x1b[1m\tb"))
    a\x1b[1m	b
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def say(text: str) -> None:
    """Print a line of text on standard error."""
    console.print(escaped(text), markup=False, highlight=False, soft_wrap=True)


def show_error(error: PibrochError) -> None:
    """Print an error's three parts, each on its own line."""
    for label, text, style in (
        ("got:", error.got, "bold red"),
        ("need:", error.need, "bold"),
        ("do:", error.do, "bold"),
    ):
        if text:
            console.print(f"[{style}]{label:6}[/{style}]", end="", highlight=False)
            say(text)


def leave(exit_code: int) -> NoReturn:
    """End the process, now if it is one of several ranks.

    Their threads may hang in a broken process group for minutes.
    """
    # it may be half imported
    is_joined = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    if is_joined is None or not is_joined():
        sys.exit(exit_code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def leave_with(error: PibrochError) -> NoReturn:
    """Show an error and end the process, from any thread."""
    from pibroch.launch.child import tell_launcher

    show_error(error)
    leave(tell_launcher(error))
