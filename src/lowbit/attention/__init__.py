"""Attention over a paged, quantized cache: PagedCache holds keys and values, DecodePlan and PrefillPlan read them.

pages.py      which page belongs to which sequence: counts of users, sharing, copies before writing
new_tokens.py what append() asks of its tensors
cache.py      PagedCache: pages of every layer, sequences, append, gather
schedule.py   how keys are cut into the items of a work list
gathered.py   prompts that are computed in contiguous memory, and why others are not
checks.py     what plans ask of batches, caches and tensors
debug.py      what plans check on the device when they are asked to
plan.py       DecodePlan, PrefillPlan: plan() once a step, run() once a layer
"""

from lowbit.attention.cache import Batch, PagedCache
from lowbit.attention.pages import PagePool
from lowbit.attention.plan import DecodePlan, PrefillPlan
from lowbit.kernels.attention import AttentionProblem

__all__ = ["AttentionProblem", "Batch", "DecodePlan", "PagePool", "PagedCache", "PrefillPlan"]
