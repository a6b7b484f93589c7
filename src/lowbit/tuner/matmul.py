"""Matmuls to tune: the families of a device with their configurations, and runs on weights that no cache holds."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lowbit.dispatch.choose import comparable, untuned
from lowbit.dispatch.tuned import problem_key, source_digest
from lowbit.errors import UnsupportedConfig
from lowbit.formats import Section, parse_format
from lowbit.kernels import KernelConfig, Problem, get_family
from lowbit.packing import PackedWeight
from lowbit.timing import Sampler, clocked, graphed
from lowbit.tuner.operands import beyond_caches, copies_of, memory_reader, random_sections, random_weight, require_room
from lowbit.tuner.space import Space, get_space
from lowbit.tuner.tunable import Bench, Candidate, Key, Tunable, WrongResult

TOLERANCE = 2e-2  # relative, of two ways to round sums to 16 bits; a wrong tile is off by one
MOST_CPU_COPIES = 16  # each has a plan for every configuration; more memory than that is read in between


class Matmul(Tunable[Problem]):
    name = "matmul"

    def key(self, problem: Problem) -> Key:
        return problem_key(problem)

    def problem(self, key: Key, device: str, index: int) -> Problem:
        x = getattr(torch, key["x"])
        if device == "cpu":
            torch.set_num_threads(key["threads"])  # it is a problem for so many
        return Problem(
            key["m"], key["n"], key["k"], parse_format(key["format"]), key["layout"], x, x, device,
            sections=tuple(Section(start, stop, parse_format(name)) for start, stop, name in key.get("sections", [])),
            batch_invariant=key["batch_invariant"], index=index,
        )  # fmt: skip

    def labels(self, key: Key) -> tuple[str, str, str, str]:
        kept = f"{len(key['sections'])} sections" if "sections" in key else key["format"]
        return f"{key['n']} x {key['k']}", str(key["m"]), kept, key["x"]

    def device(self, problem: Problem) -> tuple[str, int]:
        return problem.device, problem.index

    def chosen(self, problem: Problem) -> Candidate:
        return candidate_of(untuned(problem).config)

    def candidates(self, problem: Problem, most: int) -> list[Candidate]:
        require_room(
            f"{problem.n} x {problem.k} {problem.format}", operand_bytes(problem), problem.device, problem.index
        )
        own = self.chosen(problem)
        found = [own, candidate_of(get_family(own.family).default(problem))]
        for name in self.families(problem):
            legal = (c for c in self._ranked(problem, name) if get_family(name).legal(c, problem) is None)
            found += [candidate_of(c) for c in islice(legal, most if name == own.family else most // 2)]
        return list(dict.fromkeys(found))

    def configurations(self, space: Space, problem: Problem) -> list[KernelConfig]:
        """What is looked at of a family."""
        return space.candidates(problem)

    def _ranked(self, problem: Problem, name: str) -> list[KernelConfig]:
        """A family's configurations, the best estimate first; of those that are alike only the best."""
        space = get_space(name)
        configs = sorted(self.configurations(space, problem), key=lambda config: space.estimate_us(config, problem))
        alike: dict[KernelConfig, KernelConfig] = {}
        for config in configs:
            alike.setdefault(space.alike(config), config)
        return list(alike.values())

    def related(self, problem: Problem, best: Candidate) -> list[Candidate]:
        space, config = self._parts(best, problem)
        family = get_family(best.family)
        found = (c for c in space.related(config) if family.legal(c, problem) is None and space.fits(c, problem))
        return [candidate_of(c) for c in found]

    def fits(self, problem: Problem, candidate: Candidate) -> bool:
        if candidate.family not in self.families(problem):
            return False
        space, config = self._parts(candidate, problem)
        return get_family(candidate.family).legal(config, problem) is None and space.fits(config, problem)

    def kernel(self, problem: Problem, candidate: Candidate) -> Candidate:
        space, config = self._parts(candidate, problem)
        return candidate_of(space.kernel(config))

    def kernel_scope(self, problem: Problem) -> str:
        sections = "".join(f" {s.start}:{s.stop}:{s.format}" for s in problem.sections)
        return f"{problem.device} {problem.format} {problem.x_dtype} {problem.y_dtype}{sections}"

    def compile(self, problem: Problem, candidate: Candidate) -> None:
        space, config = self._parts(candidate, problem)
        space.compile(config, problem, bias=False)

    def bench(self, problem: Problem) -> Bench:
        with torch.inference_mode():
            return MatmulBench(problem)

    def source(self, candidate: Candidate) -> str:
        return source_digest(candidate.family)

    def families(self, problem: Problem) -> list[str]:
        """What may run a problem when nobody asks for a family. Raises UnsupportedConfig where only the reference."""
        names = [name for name in comparable() if get_family(name).legal(None, problem) is None]
        if not names:
            raise UnsupportedConfig(f"{problem}: only the reference serves it ({untuned(problem).passed[-1][1]})")
        if problem.batch_invariant:  # another family adds in another order
            return [untuned(problem).family.name]
        return names

    def _parts(self, candidate: Candidate, problem: Problem) -> tuple[Space, KernelConfig]:
        return get_space(candidate.family), config_of(candidate)


def operand_bytes(problem: Problem) -> float:
    """Bytes of what a bench holds: copies of the weight, x and y; on a CPU also the codes that it is packed from."""
    parts = [(s.format, s.stop - s.start) for s in problem.sections] or [(problem.format, problem.k)]
    weight = sum(form.total_bits(problem.n, columns) for form, columns in parts) / 8
    rows = problem.m * (problem.k + problem.n) * problem.x_dtype.itemsize
    if problem.device == "cuda":
        return copies_of(weight) * weight + rows
    return min(MOST_CPU_COPIES, -(-beyond_caches() // weight)) * weight + problem.n * problem.k + rows


def candidate_of(config: KernelConfig) -> Candidate:
    """A configuration as JSON."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return Candidate.of(values.pop("family"), values)


def config_of(candidate: Candidate) -> KernelConfig:
    """The inverse of candidate_of()."""
    return get_family(candidate.family).config_type(family=candidate.family, **candidate.values)


class MatmulBench(Bench):
    """Copies of one random weight, a random x, and the result of what runs untuned."""

    _held: tuple[Any, list[PackedWeight]] | None = None  # of the problem before, which often has the same weight

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        if problem.device == "cuda":
            torch.cuda.set_device(problem.index)
        where = torch.device(f"cuda:{problem.index}" if problem.device == "cuda" else "cpu")
        generator = torch.Generator(where).manual_seed(problem.m)
        self.weights = self._weights(problem, where)
        x = torch.randn(problem.m, problem.k, device=where, generator=generator)
        self.x = x.to(problem.x_dtype)
        self.pool = torch.cuda.graph_pool_handle() if where.type == "cuda" else None
        own = untuned(problem)
        self.expected = own.family.run(own.config, self.x, self.weights[0], None).float()

    @classmethod
    def _weights(cls, problem: Problem, where: torch.device) -> list[PackedWeight]:
        key = (problem.n, problem.k, problem.sections or problem.format, problem.layout, where)
        if cls._held is None or cls._held[0] != key:
            cls._held = None  # freed before others are made
            if where.type == "cuda":
                torch.cuda.empty_cache()
            if problem.sections:
                first = random_sections(problem.n, problem.sections, problem.layout, where)
            else:
                first = random_weight(problem.n, problem.k, problem.format, problem.layout, where)
            on_cpu = min(MOST_CPU_COPIES, -(-beyond_caches() // first.nbytes))
            count = copies_of(first.nbytes) if where.type == "cuda" else on_cpu
            cls._held = key, [first, *(first.map_tensors(Tensor.clone) for _ in range(count - 1))]
        return cls._held[1]

    @torch.inference_mode()
    def sampler(self, candidate: Candidate) -> Sampler:
        config, x, weights = config_of(candidate), self.x, self.weights
        run = get_family(candidate.family).run
        first = run(config, x, weights[0], None)
        off = float((first.float() - self.expected).norm() / self.expected.norm())
        if not off < TOLERANCE:
            raise WrongResult(f"{candidate}: its result is off by {off:.2g}")
        if not torch.equal(first, run(config, x, weights[0], None)):
            raise WrongResult(f"{candidate}: its result differs from run to run")

        @torch.inference_mode()
        def launches() -> None:
            for weight in weights:
                run(config, x, weight, None)

        if self.pool is None:
            sample = clocked(launches, len(weights))
            if len(weights) * weights[0].nbytes >= beyond_caches():
                return sample
            read = memory_reader(beyond_caches())

            def cold() -> float:
                read()
                return sample()

            return cold
        return graphed(launches, len(weights), self.pool)

    def close(self) -> None:
        for weight in self.weights:
            weight.handles.clear()


TUNABLE = Matmul()
