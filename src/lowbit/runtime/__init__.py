"""Runtime: LLM, sampling, chat templates; text in, text out."""

from lowbit.runtime.chat_template import ChatTemplate
from lowbit.runtime.completion import Completion
from lowbit.runtime.llm import LLM
from lowbit.runtime.memory import Memory
from lowbit.runtime.sampling import SamplingParams
from lowbit.runtime.stream import TextStream

__all__ = ["LLM", "ChatTemplate", "Completion", "Memory", "SamplingParams", "TextStream"]
