"""Torch modules with packed weights."""

from lowbit.nn.convert import convert
from lowbit.nn.embedding import Embedding
from lowbit.nn.inputs import ROUNDINGS
from lowbit.nn.linear import Linear
from lowbit.nn.packed_module import PackedModule

__all__ = ["ROUNDINGS", "Embedding", "Linear", "PackedModule", "convert"]
