"""Checkpoints: files on disk to QuantizedTensor and back, one module per format and a registry that probes."""

from lowbit.checkpoint.base import (
    CACHE_PARTS,
    Checkpoint,
    CheckpointWarning,
    Entry,
    MissingTensor,
    Progress,
    TokenizerData,
    Value,
)
from lowbit.checkpoint.compressed_tensors.writer import WriteReport, write_compressed_tensors
from lowbit.checkpoint.registry import open_checkpoint

__all__ = [
    "CACHE_PARTS",
    "Checkpoint",
    "CheckpointWarning",
    "Entry",
    "MissingTensor",
    "Progress",
    "TokenizerData",
    "Value",
    "WriteReport",
    "open_checkpoint",
    "write_compressed_tensors",
]
