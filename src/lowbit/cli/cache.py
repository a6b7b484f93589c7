"""`lowbit cache`: where compiled CPU kernels are kept, and how to delete them."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import show, show_json

EXAMPLES = ("lowbit cache", "lowbit cache clear")

ACTIONS = ("show", "clear")


def command(
    action: Annotated[str, typer.Argument(metavar="[clear]", help="Delete the compiled kernels.")] = "show",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the directory of compiled CPU kernels and its size, or clear it.

    Kernels are compiled again when they are needed, which takes a second or two for a model.
    """
    from lowbit.errors import UsageError
    from lowbit.kernels.cpu.cache import cache_directory, cache_size, clear_cache

    if action not in ACTIONS:
        raise UsageError(f"cache {action}: it is one of {', '.join(ACTIONS)}")
    directory = cache_directory()
    size_bytes = clear_cache() if action == "clear" else cache_size()
    if json:
        show_json({"directory": str(directory), "cleared" if action == "clear" else "holds": size_bytes})
        return
    done = "cleared" if action == "clear" else "holds"
    show(f"compiled kernels: {directory}", f"  {done} {size_bytes / 1e6:.1f} MB")
