"""Every error lowbit raises on purpose. All derive from LowbitError, so one `except` catches them.

A message names the value it met, the rule it broke, and what to do instead. Errors about an argument are also
ValueError, so callers who know only the standard library catch them too.
"""


class LowbitError(Exception):
    """Base of all errors raised by lowbit."""


class FormatError(LowbitError, ValueError):
    """A weight format that does not exist, or a tensor that contradicts its format."""


class LayoutError(LowbitError, ValueError):
    """Packed words that contradict their layout, or a layout that cannot hold a format."""


class QuantizationError(LowbitError, ValueError):
    """Weights that cannot be quantized as asked: NaN, infinity, or scales out of range."""


class UnsupportedConfig(LowbitError, ValueError):
    """No kernel serves this problem, or the one asked for does not."""


class CheckpointError(LowbitError):
    """A file that is missing, damaged, hostile, or of an unknown kind."""


class ModelError(LowbitError):
    """A model whose configuration or tensors do not fit together."""


class UsageError(LowbitError, ValueError):
    """A call that cannot be served as written: an empty prompt, an impossible option. Command line exit code 2."""


class SlowPathWarning(UserWarning):
    """Nobody asked for the reference, but no faster kernel serves the problem. Given once for each set of reasons."""


class CompileWarning(UserWarning):
    """A kernel was compiled while somebody waited for its result. Given once; `lowbit warmup` compiles ahead."""
