"""From a finished job to its output: the checkpoint, and the report beside it. May be stopped and repeated too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.checkpoint import Progress, WriteReport, write_compressed_tensors
from lowbit.checkpoint.files import require_free
from lowbit.quantizers.job import Job
from lowbit.quantizers.saved import PARTIAL, full_disk, write_whole

REPORT = "quantization_report.json"
SAVED = "report.json"
SUFFIX = ".unfinished"


def work_folder(output: Path) -> Path:
    """Where the work on an output is kept until it is done."""
    return output.with_name(output.name + SUFFIX)


def require_output(output: Path) -> None:
    """Raise CheckpointError for an output that is taken, unless by a run that was stopped at its very end."""
    if not (work_folder(output) / SAVED).exists():
        require_free(output)


def deliver(job: Job, output: Path, report: Mapping[str, Any], progress: Progress | None = None) -> WriteReport | None:
    """Write the output and the report in it, then remove the work folder.

    Returns None where an earlier run had written the output already and only the report and the removal were missing.
    Raises CheckpointError and QuantizationError as their writers do; the finished blocks are kept then.
    """
    written = None
    with job.work.held(job.fingerprint):
        for left in output.parent.glob(f".{output.name}.*{PARTIAL}"):  # by a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        if not (job.work.path / SAVED).exists() or not (output / "config.json").exists():
            job.work.write_json(SAVED, report)
            written = write_compressed_tensors(job.view(), output, progress)
        with full_disk(output):
            write_whole(output / REPORT, json.dumps(report, indent=1) + "\n")
        job.work.remove()
    return written
