"""Chat templates: messages -> the text a model was trained to answer.

The template comes with the checkpoint, so from a stranger. It runs in a process of its own (template_worker.py) inside
jinja2's immutable sandbox, bounded in every direction: its source, its time, its memory, what it writes. A template
that breaks a bound is an error within about SECONDS, however it does it: the process is killed. The process starts with
the first use (about a tenth of a second), then a rendering takes about a millisecond.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit.errors import ModelError, UsageError

Message = Mapping[str, Any]  # "role" and "content"; further keys (tool_calls, ...) are for the template to read

MAX_SOURCE = 256 * 1024  # characters of template; the longest in use have about 20 000
MAX_TEXT = 8 * 1024 * 1024  # characters it may write
SECONDS = 2.0  # to compile and render
_START_SECONDS = 30  # for the process to come up on a loaded machine


class ChatTemplate:
    """One template, and the process that renders it while this object lives. Safe to use from several threads."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "") -> None:
        """Raises ModelError when the source is too long; anything else wrong with it shows when it is rendered."""
        if len(source) > MAX_SOURCE:
            raise ModelError(
                f"the chat template has {len(source)} characters: at most {MAX_SOURCE} are run; "
                "use another copy of the model, or write the prompt yourself with generate()"
            )
        self._source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def start(self) -> None:
        """Start the process now, without waiting for it, so that the first `render` need not."""
        with self._lock:
            self._living_worker()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt's text. `variables` are what this template knows besides (enable_thinking=False, ...).

        Raises UsageError for messages that are malformed or that the template refuses, ModelError for a template that
        is broken, forbidden, or out of bounds.
        """
        _check(messages)
        variables = {"tools": tools, "documents": None, **self._tokens, **variables}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        request = {
            "source": self._source,
            "variables": variables,
            "most_characters": MAX_TEXT,
            "seconds": math.ceil(SECONDS),
        }
        try:
            line = json.dumps(request).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"messages and template variables must be plain JSON data ({error}): "
                "pass strings, numbers, lists and dicts"
            ) from None
        with self._lock:
            reply = self._ask(line)
        if "text" in reply:
            return str(reply["text"])
        if reply["error"] == "refused":
            raise UsageError(
                f"the model's chat template refuses these messages: {reply['message']}; "
                "change their roles, order or content accordingly"
            )
        raise ModelError(
            f"the model's chat template failed: {reply['message']}; "
            "use another copy of the model, or write the prompt yourself with generate()"
        )

    def _ask(self, line: bytes) -> dict[str, str]:
        worker = self._living_worker()
        try:
            reply = worker.ask(line, SECONDS)
        except TimeoutError:
            reply = {"error": "time", "message": f"it was not done after {SECONDS:g} seconds"}
        except EOFError:
            reply = {"error": "died", "message": "its process ended, out of memory, stack or CPU time"}
        if reply.get("error") in ("time", "died", "memory"):  # a process that ran out of memory is not trusted again
            worker.close()
            self._worker = None
        return reply

    def _living_worker(self) -> _Worker:
        if self._worker is None or not self._worker.usable:
            self._worker = _Worker()
        return self._worker


class _Worker:
    """A running template_worker.py, and a thread that collects the lines it writes."""

    def __init__(self) -> None:
        # -I -S: no environment, no site-packages and none of their start-up files; only these two packages are added.
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("template_worker.py"))]
        command += [_home_of("jinja2"), _home_of("markupsafe")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(self._process, self._lines), daemon=True).start()
        self._ready = False
        self._owner = os.getpid()
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def usable(self) -> bool:
        """Whether it runs and belongs to this process (a fork inherits the pipes, not the thread)."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, line: bytes, seconds: float) -> dict[str, str]:
        """Send a request, wait for its reply. Raises TimeoutError, or EOFError when the process ended."""
        if not self._ready:
            reply = self._receive(_START_SECONDS)
            if "error" in reply:
                return reply
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except OSError:  # a pipe without a reader
            raise EOFError from None
        return self._receive(seconds)

    def _receive(self, seconds: float) -> dict[str, str]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if not line.endswith(b"\n"):
            raise EOFError
        reply: dict[str, str] = json.loads(line)
        return reply


def _collect(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        while line := stream.readline(8 * MAX_TEXT):
            lines.put(line)
        lines.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # what is still buffered has no reader
            process.stdin.close()


def _home_of(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"chat templates need the package {package}: install it with pip install jinja2")
    return str(Path(spec.submodule_search_locations[0]).parent)


def _check(messages: object) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            f"messages={messages!r}: must be a list of at least one message, "
            'such as [{"role": "user", "content": "Hello"}]'
        )
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content", "") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str | list | None):
            raise UsageError(
                f"messages[{at}]={message!r}: must be a dict with a role (a text: user, assistant, system, ...) and "
                "content (a text, or a list of parts)"
            )
