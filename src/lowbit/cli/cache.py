"""`lowbit cache`: where compiled kernels and measurements are kept, and how to delete them."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli import options
from lowbit.cli.console import show, show_json

EXAMPLES = ("lowbit cache", "lowbit cache clear", "lowbit cache clear-measurements")

ACTIONS = ("show", "clear", "clear-kernels", "clear-measurements")


def command(
    action: Annotated[
        str, typer.Argument(metavar="[clear|clear-kernels|clear-measurements]", help="What to delete.")
    ] = "show",
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show the directory of compiled kernels and the files of measurements (lowbit tune), or delete them.

    Kernels are compiled again when they are needed, which takes a second or two for a model; what was measured is
    gone until lowbit tune measures it again.
    """
    from lowbit.errors import UsageError
    from lowbit.kernels.cpu.cache import cache_directory, cache_size, clear_cache
    from lowbit.places import cache_root
    from lowbit.store import clear_files, list_files

    if action not in ACTIONS:
        raise UsageError(f"cache {action}: it is one of {', '.join(ACTIONS)}")
    kernels, measurements = cache_directory(), cache_root("cache") / "tuned"
    clears_kernels = action in {"clear", "clear-kernels"}
    files = list_files(measurements)
    size_bytes = clear_cache() if clears_kernels else cache_size()
    if clears_measurements := action in {"clear", "clear-measurements"}:
        clear_files(measurements)
    if json:
        show_json(
            {
                "directory": str(kernels),
                "cleared" if clears_kernels else "holds": size_bytes,
                "measurements_cleared" if clears_measurements else "measurements": files,
            }
        )
        return
    show(f"compiled kernels: {kernels}", f"  {'cleared' if clears_kernels else 'holds'} {size_bytes / 1e6:.1f} MB")
    show(f"measurements: {measurements}")
    for file in files:
        rows = "damaged" if file["rows"] is None else f"{file['rows']} matrices and numbers of tokens"
        show(f"  {'cleared' if clears_measurements else 'holds'} {file['file']}: {rows}")
