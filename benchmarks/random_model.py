"""GGUF files of one Llama with random weights in several types, to compare engines on shapes no file here has.

    python benchmarks/random_model.py FOLDER [--types Q4_0 TQ2_0] [--layers 16]

The default shape has 822 million weights: hidden 2048, 16 layers, ffn 5632, 16 query and 4 key heads of 128, a tied
vocabulary of 49152. Linears are in the type, the embedding is Q8_0, norms are fp32. All layers have the same numbers,
which lie in the file as often as there are layers; time does not depend on them. There is no tokenizer inside.
Files are FOLDER/llama-SIZE-TYPE.gguf, half a gigabyte each for the default.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    layers: int = 16
    hidden: int = 2048
    ffn: int = 5632
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 49152
    context: int = 4096

    def linears(self) -> dict[str, tuple[int, int]]:
        """(n, k) of the matrices of a layer by the name they have in the file."""
        kv = self.hidden // self.heads * self.kv_heads
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }

    @property
    def weights(self) -> int:
        """How many there are in all matrices."""
        return self.layers * sum(n * k for n, k in self.linears().values()) + self.vocabulary * self.hidden


def write(shape: Shape, name: str, path: Path) -> None:
    """Write the file, first under another name. name: a type that gguf.quants.quantize knows, such as Q4_0."""
    kind = GGMLQuantizationType[name]
    random = numpy.random.default_rng(0)

    def matrix(n: int, k: int) -> numpy.ndarray:
        return random.standard_normal((n, k), dtype=numpy.float32) * k**-0.5

    partial = path.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    table = quantize(matrix(shape.vocabulary, shape.hidden), GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", table, raw_dtype=GGMLQuantizationType.Q8_0)
    norm = numpy.ones(shape.hidden, dtype=numpy.float32)
    writer.add_tensor("output_norm.weight", norm)
    layer = {linear: quantize(matrix(n, k), kind) for linear, (n, k) in shape.linears().items()}
    for i in range(shape.layers):
        for which in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{which}.weight", norm)
        for linear, blocks in layer.items():
            writer.add_tensor(f"blk.{i}.{linear}.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q4_0", "TQ2_0"])
    parser.add_argument("--layers", type=int, default=16)
    arguments = parser.parse_args()
    shape = Shape(layers=arguments.layers)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.types:
        path = arguments.folder / f"llama-{shape.weights / 1e6:.0f}M-{name}.gguf"
        write(shape, name, path)
        print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
