"""Reports: a record of what was measured, and its views as table, plot and JSON."""

from lowbit.report.plots import plot_quality, plots_available
from lowbit.report.quality import FormatResult, QualityReport
from lowbit.report.speed import AttentionSpeed, MatmulSpeed, Speed, speed_table
from lowbit.report.speed_plots import plot_speeds, speed_bars
from lowbit.report.tables import quality_table, sentences_table

__all__ = [
    "AttentionSpeed",
    "FormatResult",
    "MatmulSpeed",
    "QualityReport",
    "Speed",
    "plot_quality",
    "plot_speeds",
    "plots_available",
    "quality_table",
    "sentences_table",
    "speed_bars",
    "speed_table",
]
