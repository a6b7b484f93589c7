"""From a finished job to its output: the checkpoint, and the report beside it. May be stopped and repeated too."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit.checkpoint import Progress, WriteReport, write_compressed_tensors
from lowbit.checkpoint.compressed_tensors.writer import written_settings
from lowbit.checkpoint.files import require_free
from lowbit.quantizers.job import Job
from lowbit.quantizers.saved import full_disk, sync, write_whole

REPORT = "quantization_report.json"
SAVED = "report.json"
MADE = "output"  # in the work folder, until it is whole
SUFFIX = ".unfinished"


def work_folder(output: Path) -> Path:
    """Where the work on an output is kept until it is done."""
    return output.with_name(output.name + SUFFIX)


def require_output(output: Path) -> None:
    """Raise CheckpointError for an output that is taken, unless by a run that was stopped at its very end."""
    if output.name in {"", ".."} or not _delivered(output):
        require_free(output)


def _delivered(output: Path) -> bool:
    """Whether an output is what the run beside it wrote, so that only the removal of its folder is missing."""
    try:
        return (work_folder(output) / SAVED).read_bytes() == (output / REPORT).read_bytes()
    except (OSError, ValueError):
        return False


def require_writable(job: Job) -> None:
    """Raise CheckpointError where the output cannot hold a format of the job: before the work, not after it."""
    entries = {
        name: replace(entry, form=job.formats[name] or entry.form) for name, entry in job.checkpoint.entries.items()
    }
    written_settings(job.checkpoint.with_entries(entries))


def deliver(job: Job, output: Path, report: Mapping[str, Any], progress: Progress | None = None) -> WriteReport | None:
    """Write the output with the report in it, then remove the work folder.

    The output is made in the work folder and renamed when it is whole. Returns None where an earlier run had done that
    already and only the removal was missing.
    Raises CheckpointError and QuantizationError as their writers do; the finished blocks are kept then.
    """
    written = None
    with job.work.held(job.fingerprint):
        if not _delivered(output):
            require_free(output)
            made = job.work.path / MADE
            with full_disk(made):
                if made.exists():  # by a run that was killed after it had written this
                    shutil.rmtree(made)
            job.work.write_json(SAVED, report)
            written = replace(write_compressed_tensors(job.view(), made, progress), path=output)
            with full_disk(output):
                write_whole(made / REPORT, (job.work.path / SAVED).read_text(encoding="utf-8"))
                made.rename(output)
                sync(output.parent)
        job.work.remove()
    return written
