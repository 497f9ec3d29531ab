"""The `ritornello` command: `python -m ritornello`."""

import signal
import sys

from ritornello._core import run_cli


def main() -> int:
    """Runs the command with this process's arguments and returns its exit status."""
    # Native code runs the command, so Ctrl-C must end the process instead of waiting for the
    # interpreter.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return run_cli(["ritornello", *sys.argv[1:]], sys.executable)


if __name__ == "__main__":
    sys.exit(main())
