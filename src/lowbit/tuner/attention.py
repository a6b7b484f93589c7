"""Attention to tune: how a decode over a paged cache is cut and tiled, for so many requests of so many tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.attention import AttentionProblem, DecodePlan
from lowbit.dispatch.tuned_attention import attention_digest, attention_key
from lowbit.errors import UnsupportedConfig
from lowbit.formats.kv import kv_format
from lowbit.kernels.attention import AttentionBackend, DecodeConfig, choose_backend, get_backend
from lowbit.kernels.gpu import attention_launch
from lowbit.kernels.gpu.attention import decode_kernels
from lowbit.kernels.gpu.attention_plan import GpuDecode
from lowbit.models.config import ModelConfig
from lowbit.timing import Sampler, clocked, graphed
from lowbit.tuner.operands import COPIES_BYTES, LEAST_COPIES, beyond_caches, require_room
from lowbit.tuner.pages import cache_bytes, filled_cache, layers_for
from lowbit.tuner.spaces.attention import cpu_configs, cut, estimate_us, gpu_configs
from lowbit.tuner.tunable import Bench, Candidate, Key, Tunable, WrongResult

TOLERANCE = 2e-2  # relative, of two orders of sums rounded to 16 bits; a missing key is off by more
REQUESTS, LENGTHS = (1,), (1024, 4096)


@dataclass(frozen=True)
class AttentionCase:
    """One kind of decode: a row serves similar numbers of requests and tokens too (dispatch/tuned_attention.py)."""

    problem: AttentionProblem
    requests: int
    length: int  # tokens of each request
    index: int = 0  # of the device

    def __str__(self) -> str:
        return f"{self.problem}, {self.requests} requests of {self.length} tokens"


class Attention(Tunable[AttentionCase]):
    name = "attention"

    def key(self, problem: AttentionCase) -> Key:
        return attention_key(problem.problem, problem.requests, problem.length)

    def problem(self, key: Key, device: str, index: int) -> AttentionCase:
        if device == "cpu":
            torch.set_num_threads(key["threads"])  # it is a problem for so many
        problem = AttentionProblem(
            key["heads"], key["kv_heads"], key["head_dim"], key["page_size"], kv_format(key["keys"]),
            kv_format(key["values"]), getattr(torch, key["x"]), device, window=key["window"], soft_cap=key["soft_cap"],
            sinks=key["sinks"], alibi=key["alibi"],
        )  # fmt: skip
        return AttentionCase(problem, key["requests"], key["length"], index)

    def labels(self, key: Key) -> tuple[str, str, str, str]:
        window = f", window {key['window']}" if key["window"] else ""
        return (
            f"attention {key['heads']}/{key['kv_heads']} x {key['head_dim']}{window}",
            f"{key['requests']} x {key['length']}", f"{key['keys']}/{key['values']}", key["x"],
        )  # fmt: skip

    def device(self, problem: AttentionCase) -> tuple[str, int]:
        return problem.problem.device, problem.index

    def chosen(self, problem: AttentionCase) -> Candidate:
        backend = choose_backend("auto", problem.problem)
        config = backend.decode_config(problem.problem, problem.requests)
        if config is None:
            raise UnsupportedConfig(f"{problem}: the backend {backend.name!r} has nothing to choose")
        return candidate_of(backend, config)

    def candidates(self, problem: AttentionCase, most: int) -> list[Candidate]:
        held = 2 * cache_bytes(problem.problem, problem.requests * problem.length)
        require_room(f"{problem.requests} x {problem.length} tokens", held, *self.device(problem))
        layers_of(problem)
        own = self.chosen(problem)
        backend = get_backend(own.family)
        if own.family == "gpu":
            target = attention_launch.capability(f"cuda:{problem.index}")
            found: list[Any] = gpu_configs(problem.problem, target)
            found.sort(key=lambda c: estimate_us(c, problem.problem, problem.requests, problem.length, target))
        else:
            found = list(cpu_configs())
        chosen: dict[Any, DecodeConfig] = {}  # by what distinguishes them here: of equal cuts one is enough
        for config in [config_of(own), *found]:
            if backend.illegal_config(config, problem.problem) is None:
                size = cut(problem.problem, problem.requests, problem.length,
                           backend.shape(problem.problem, False, config))  # fmt: skip
                chosen.setdefault((size, replace(config, units=1, least_keys=64)), config)
        return [candidate_of(backend, config) for config in list(chosen.values())[: most + 1]]

    def related(self, problem: AttentionCase, best: Candidate) -> list[Candidate]:
        """The same machine code with keys cut otherwise."""
        config = config_of(best)
        others = sorted({config.units * 2, max(1, config.units // 2)} - {config.units})
        return [
            c for units in others if self.fits(problem, c := candidate_of(best.family, replace(config, units=units)))
        ]

    def fits(self, problem: AttentionCase, candidate: Candidate) -> bool:
        backend = choose_backend("auto", problem.problem)
        return backend.name == candidate.family and (
            backend.illegal_config(config_of(candidate), problem.problem) is None
        )

    def kernel(self, problem: AttentionCase, candidate: Candidate) -> Candidate:
        return candidate_of(candidate.family, replace(config_of(candidate), units=1, least_keys=64))

    def kernel_scope(self, problem: AttentionCase) -> str:
        return str(problem.problem)

    def compile(self, problem: AttentionCase, candidate: Candidate) -> None:
        config = config_of(candidate)
        if isinstance(config, GpuDecode):
            target = attention_launch.capability(f"cuda:{problem.index}")
            for kernel in decode_kernels(config, problem.problem, target):
                attention_launch.compiled(kernel)

    def bench(self, problem: AttentionCase) -> Bench:
        with torch.inference_mode():
            return AttentionBench(problem, config_of(self.chosen(problem)))

    def source(self, candidate: Candidate) -> str:
        return attention_digest(candidate.family)


def candidate_of(backend: AttentionBackend | str, config: DecodeConfig) -> Candidate:
    """A configuration as JSON."""
    return Candidate.of(backend if isinstance(backend, str) else backend.name, asdict(config))


def config_of(candidate: Candidate) -> DecodeConfig:
    """The inverse of candidate_of()."""
    return get_backend(candidate.family).config_type(**candidate.values)


def layers_of(case: AttentionCase) -> int:
    """Of a cache that no processor's cache holds. Raises UsageError for so small a case that they would be too many."""
    nbytes = COPIES_BYTES if case.problem.device == "cuda" else beyond_caches()
    return layers_for(case.problem, case.requests, case.length, nbytes)


class AttentionBench(Bench):
    """Layers of a filled cache that no processor's cache holds, random queries, and what runs untuned as the truth."""

    def __init__(self, case: AttentionCase, own: DecodeConfig) -> None:
        problem = case.problem
        self.case, on_gpu = case, problem.device == "cuda"
        if on_gpu:
            torch.cuda.set_device(case.index)
        self.cache, self.batch = filled_cache(problem, case.requests, case.length, layers_of(case), case.index)
        where = self.cache.device
        generator = torch.Generator(where).manual_seed(1)
        query = torch.randn(case.requests, problem.heads, problem.head_dim, device=where, generator=generator)
        self.query = query.to(problem.dtype)
        self.extra: dict[str, Tensor] = {}
        if problem.sinks:
            self.extra["sinks"] = torch.zeros(problem.heads, device=where)
        if problem.alibi:
            self.extra["slopes"] = torch.linspace(0.01, 0.5, problem.heads, device=where)
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.expected = self._plan(own).run(0, self.cache, self.query, **self.extra).float()

    def _plan(self, config: DecodeConfig) -> DecodePlan:
        plan = DecodePlan(
            self.case.problem, max_requests=self.case.requests, max_length=self.case.length, config=config
        )
        plan.plan(self.batch)
        return plan

    @torch.inference_mode()
    def sampler(self, candidate: Candidate) -> Sampler:
        plan = self._plan(config_of(candidate))
        first = plan.run(0, self.cache, self.query, **self.extra)
        off = float((first.float() - self.expected).norm() / self.expected.norm())
        if not off < TOLERANCE:
            raise WrongResult(f"{candidate}: its result is off by {off:.2g}")
        layers = len(self.cache.keys)
        if not all(torch.equal(first, plan.run(at, self.cache, self.query, **self.extra)) for at in (0, layers - 1)):
            raise WrongResult(f"{candidate}: its result differs from run to run")
        out = torch.empty_like(self.query)
        rounds = -(-LEAST_COPIES // layers) if self.pool is not None else 1

        @torch.inference_mode()
        def launches() -> None:
            for _ in range(rounds):
                for layer in range(layers):
                    plan.run(layer, self.cache, self.query, out=out, **self.extra)

        if self.pool is None:
            return clocked(launches, layers)
        return graphed(launches, rounds * layers, self.pool)

    def close(self) -> None:
        if self.pool is not None:
            del self.cache
            torch.cuda.empty_cache()


def decodes(
    config: ModelConfig,
    formats: tuple[Any, Any],  # of keys, of values: names or KVFormats
    device: torch.device,
    dtype: torch.dtype,  # of queries
    page_size: int,
    requests: Iterable[int] = REQUESTS,
    lengths: Iterable[int] = LENGTHS,
) -> list[AttentionCase]:
    """A case for each kind of layer of a model, number of requests and of tokens that the model holds."""
    sizes = (config.num_heads, config.num_kv_heads, config.head_dim, page_size)
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    problems = [AttentionProblem(*sizes, *formats, dtype, device.type, window=window) for window in windows]
    return [
        AttentionCase(problem, count, length, device.index or 0)
        for problem in problems for count in dict.fromkeys(requests)
        for length in dict.fromkeys(min(length, config.context_length) for length in lengths)
    ]  # fmt: skip


TUNABLE = Attention()
