"""llama.cpp's quantizer with its importance matrix, as the peer of quality.py."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True)
class LlamaCpp:
    """tools: the folder with llama-quantize and llama-imatrix. work: where the files go."""

    tools: Path
    work: Path
    threads: int

    def quantized(self, source: Checkpoint, kind: str, text: str, samples: int, length: int) -> tuple[Checkpoint, int]:
        """A type by its name ("Q3_K_M"), read back as 32-bit floats, and the bytes of all its tensors.

        Every type can be read so, those that lowbit has no reader for too. text: what the importance matrix is of, in
        `samples` windows of `length` tokens.
        """
        from gguf import GGUFReader

        from gguf_of import write_gguf

        base, matrix = self.work / "float.gguf", self.work / "imatrix.gguf"
        if not base.exists():
            write_gguf(source, base)
        threads = str(self.threads)
        if not matrix.exists():
            read = self.work / "calibration.txt"
            read.write_text(text, encoding="utf-8")
            run(self.tools / "llama-imatrix", "-m", base, "-f", read, "-o", matrix, "-c", length, "-b", length,
                "--chunks", samples, "-t", threads)  # fmt: skip
        quantized, plain = self.work / f"{kind}.gguf", self.work / f"{kind}-float.gguf"
        run(self.tools / "llama-quantize", "--imatrix", matrix, base, quantized, kind, threads)
        run(self.tools / "llama-quantize", "--allow-requantize", quantized, plain, "F32", threads)
        return open_checkpoint(plain), sum(int(tensor.n_bytes) for tensor in GGUFReader(quantized).tensors)


def spread(tokenizer: Any, tokens: torch.Tensor) -> str:
    """Windows [samples, length] as one text, so that the peer sees what our calibration sees."""
    return "".join(tokenizer.decode(row.tolist()) for row in tokens)


def run(*command: Any) -> None:
    """Run a tool; its output only when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
