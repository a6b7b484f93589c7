"""What the command `lowbit` runs: loads the command line where an interruption ends the process in order already."""

from __future__ import annotations

INTERRUPTED = 130


def main() -> int:
    """Run the process's command line. Returns the exit code."""
    try:
        from lowbit.cli.main import main as run

        return run()
    except KeyboardInterrupt:  # while modules load, or while another interruption was being reported
        return INTERRUPTED
