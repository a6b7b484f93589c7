"""Where the bits of a weight are. One file a layout, pack and unpack side by side; `LAYOUTS` is the registry.

A new layout is one file with a Layout subclass and a `register` call, imported here.
"""

from lowbit.packing.cpu_tile import CPU_TILE
from lowbit.packing.dense import DENSE
from lowbit.packing.fragment import FRAGMENT
from lowbit.packing.layout import LAYOUTS, Layout, get_layout, register
from lowbit.packing.stored import StoredCodes, StoredWeight, unread
from lowbit.packing.upload import Upload
from lowbit.packing.weight import TENSORS, Description, PackedWeight, pack_as

__all__ = [
    "CPU_TILE",
    "DENSE",
    "FRAGMENT",
    "LAYOUTS",
    "TENSORS",
    "Description",
    "Layout",
    "PackedWeight",
    "StoredCodes",
    "StoredWeight",
    "Upload",
    "get_layout",
    "pack_as",
    "register",
    "unread",
]
