"""Speed of packing and unpacking, one core: GB/s of codes (one byte each), every layout and width.

python benchmarks/packing.py
"""

from __future__ import annotations

import torch

from lowbit.packing import LAYOUTS, get_layout
from lowbit.timing import measure
from record import save

N = K = 4096


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    print(f"{N} x {K} codes, one thread, GB/s of codes (a copy of the codes: {copy_speed():.1f})")
    for name in LAYOUTS:
        for bits in range(1, 9):
            layout = get_layout(name)
            codes = torch.randint(0, 2**bits, (N, K), dtype=torch.uint8)
            words = layout.pack(codes, bits)
            pack = measure(lambda: layout.pack(codes, bits))  # noqa: B023 - called at once
            unpack = measure(lambda: layout.unpack(words, bits, N, K))  # noqa: B023
            row = {
                "layout": name,
                "bits": bits,
                "pack_gb_per_s": round(codes.numel() / pack.median_us / 1e3, 2),
                "unpack_gb_per_s": round(codes.numel() / unpack.median_us / 1e3, 2),
            }
            rows.append(row)
            print(f"{name:10} {bits} bits: pack {row['pack_gb_per_s']:6.2f}, unpack {row['unpack_gb_per_s']:6.2f}")
    save("cpu", "packing", rows, n=N, k=K, copy_gb_per_s=round(copy_speed(), 1))


def copy_speed() -> float:
    """The floor: GB/s of a plain copy of as many bytes."""
    codes = torch.zeros(N, K, dtype=torch.uint8)
    return codes.numel() / measure(codes.clone).median_us / 1e3


if __name__ == "__main__":
    main()
