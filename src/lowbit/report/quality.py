"""The one record behind a comparison of formats: the table, the plot and the JSON file are views of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowbit.errors import UsageError

NEEDS_CALIBRATION = 1.5  # times the baseline's perplexity: beyond it, rounding alone is not enough
DISTURBED = 0.2  # of the median: repeats of a speed that differ by more say that the machine had other work
SCHEMA = "lowbit-quality-1"


@dataclass(frozen=True)
class FormatResult:
    """One row: a model in one format, as measured."""

    name: str  # what the row is called: "int4"
    format: str  # of the linears: "int4_g64_asym"
    tables: str  # of the embedding and the output head
    bits_per_weight: float  # of all matrices together, scales and zeros included
    size_bytes: int  # of all parameters
    perplexity: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    sentence: str  # what the model said
    kernel: str = ""  # what multiplied: "torch", "reference", ...
    speed_spread: float = 0.0  # of prefill or decode, whichever is larger: slowest to fastest run over the median

    @property
    def disturbed(self) -> bool:
        """Whether the speeds of repeated runs are too far apart to be those of this machine."""
        return self.speed_spread > DISTURBED


@dataclass(frozen=True)
class QualityReport:
    """Formats of one model side by side; the first result is the baseline."""

    model: str
    text: str
    method: str  # how the perplexity was computed
    prompt: str
    speed: str  # how the tokens per second were measured
    device: str
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    results: tuple[FormatResult, ...]

    @property
    def baseline(self) -> FormatResult:
        return self.results[0]

    def ratio(self, result: FormatResult) -> float:
        """Its perplexity over the baseline's."""
        return result.perplexity / self.baseline.perplexity

    def needs_calibration(self, result: FormatResult) -> bool:
        """Whether rounding to nearest lost so much that calibration should be tried (or more bits)."""
        return not self.ratio(result) <= NEEDS_CALIBRATION

    def to_json(self) -> str:
        """A JSON document; from_json is the inverse. Numbers that are not finite become null."""
        rows = []
        for result in self.results:
            row = asdict(result)
            row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            rows.append(row | {"needs_calibration": self.needs_calibration(result), "disturbed": result.disturbed})
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "results"}
        data |= {"versions": dict(self.versions), "notes": list(self.notes), "results": rows}
        return json.dumps({"schema": SCHEMA} | data, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> QualityReport:
        """Read what to_json wrote. Raises UsageError for anything else."""
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise KeyError("schema")
            results = tuple(_result(row) for row in data.pop("results"))
            report = cls(**data | {"notes": tuple(data["notes"])}, results=results)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"not a report of schema {SCHEMA} ({error!r}): run lowbit demo to make one") from error
        return report


_DERIVED = {"needs_calibration", "disturbed"}


def _result(row: dict[str, Any]) -> FormatResult:
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in row.items() if k not in _DERIVED}
    return FormatResult(**values)
