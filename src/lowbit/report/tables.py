"""Tables for people, made with rich from the same records that become JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lowbit.report.quality import DISTURBED, NEEDS_CALIBRATION, FormatResult, QualityReport

if TYPE_CHECKING:
    from rich.table import Table


def quality_table(report: QualityReport) -> Table:
    """Size, quality and speed of each format."""
    from rich.table import Table

    table = Table(title=report.model, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("linears")
    for heading in ("bits/weight", "MB", "perplexity", "prefill\ntokens/s", "decode\ntokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for result in report.results:
        mark = " ?" if result.disturbed else ""
        table.add_row(
            result.name,
            result.format,
            f"{result.bits_per_weight:.2f}",
            f"{result.size_bytes / 1e6:.1f}",
            number(result.perplexity),
            f"{result.prefill_tokens_per_s:.0f}{mark}",
            f"{result.decode_tokens_per_s:.1f}{mark}",
            remark(report, result),
        )
    return table


def sentences_table(report: QualityReport) -> Table:
    """What each format answers to the same prompt."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title="What it says", title_justify="left", title_style="bold", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for result in report.results:
        table.add_row(result.name, Text(shorten(result.sentence)))  # Text: a model may write what rich takes for markup
    return table


def remark(report: QualityReport, result: FormatResult) -> str:
    """The last column: how the row compares with the baseline."""
    if result is report.baseline:
        return "baseline"
    if report.needs_calibration(result):
        return "needs calibration"
    return f"{(report.ratio(result) - 1) * 100:+.1f} % perplexity"


def legend(report: QualityReport) -> str:
    """What the remarks and marks mean, to print under the table."""
    text = f"needs calibration: more than {NEEDS_CALIBRATION:g} times the baseline's perplexity by rounding alone"
    if any(result.disturbed for result in report.results):
        text += (
            f"\n?: disturbed, repeated runs differed by more than {DISTURBED * 100:.0f} %: the machine had other work; "
            "measure again when there is none"
        )
    return text


def number(value: float) -> str:
    """A perplexity: two decimals, thousands grouped once it is large, a power of ten beyond a million."""
    if not math.isfinite(value):
        return "infinite"
    if value >= 1e6:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def shorten(text: str, limit: int = 200) -> str:
    """Text on one line, control characters replaced, cut after `limit` characters."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def bytes_text(count: int) -> str:
    """12.3 MB: decimal units, as disks and model cards count."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
