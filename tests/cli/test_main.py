"""Help, exit codes, silence on interruption, and that nothing heavy loads before it is needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]  # the fixture lowbit: .code .out .err .json
COMMANDS = (
    "demo", "quantize", "generate", "chat", "eval", "inspect", "explain", "tune", "warmup", "env", "cache", "bench",
)  # fmt: skip


def test_help_lists_every_command(lowbit: Run) -> None:
    done = lowbit("--help")
    assert done.code == 0 and done.err == ""
    assert all(f" {name} " in done.out for name in COMMANDS)
    assert "lowbit demo" in done.out


@pytest.mark.parametrize("command", [*COMMANDS[:-1], "bench matmul", "bench sampling", "bench model"])
def test_every_command_has_help_with_examples(command: str, lowbit: Run) -> None:
    done = lowbit(*command.split(), "--help")
    assert done.code == 0
    assert "Examples" in done.out and f"lowbit {command}" in done.out and "--debug" in done.out


@pytest.mark.parametrize("command", ["tune", "warmup"])
def test_help_says_which_numbers_of_tokens_are_taken(command: str, lowbit: Run) -> None:
    from lowbit.tuner.work import TOKENS

    words = " ".join(lowbit(command, "--help").out.replace("\u2502", " ").split())
    assert f"[default: {' '.join(map(str, TOKENS))}]" in words


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from lowbit.cli.main import main; main(['quantize', '--help'])\n"
        "print(sorted({'torch', 'numpy', 'llvmlite', 'matplotlib', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(lowbit: Run) -> None:
    from lowbit import __version__

    assert lowbit("--version").out == f"lowbit {__version__}\n"


def test_no_command_is_help_and_no_error(lowbit: Run) -> None:
    for arguments in ([], ["bench"]):
        done = lowbit(*arguments)
        assert (done.code, done.err) == (2, "")
        assert "Usage: lowbit" in done.out


def test_errors_do_not_steer_the_terminal(lowbit: Run) -> None:
    done = lowbit("inspect", "a\x1b[31m\x07")
    assert done.code == 1
    assert "a [31m  does not exist" in done.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["quantize", "a"], "Missing argument 'OUTPUT'; lowbit quantize --help shows what there is"),
        (["inspect", "a", "--nope"], "No such option"),
        (["eval", "a", "--window", "many"], "Invalid value for '--window'"),
        (["eval", "a", "--window", "0"], "Invalid value for '--window'"),
    ],
)
def test_usage_errors(arguments: list[str], says: str, lowbit: Run) -> None:
    done = lowbit(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lowbit: error: ") and says in done.err
    assert done.err.count("\n") == 1


def test_no_traceback_unless_asked_for(lowbit: Run) -> None:
    plain = lowbit("inspect", "/nowhere")
    assert plain.code == 1 and "Traceback" not in plain.err
    for arguments in (["--debug", "inspect", "/nowhere"], ["inspect", "/nowhere", "--debug"]):
        done = lowbit(*arguments)
        assert done.code == 1
        assert done.err.startswith("Traceback") and done.err.splitlines()[-1] == plain.err.rstrip()


OUT_OF_MEMORY = "out of memory: use a format with fewer bits, a shorter prompt, a smaller window or smaller sizes"


def test_a_defect_is_called_one(lowbit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: str) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("lowbit.cli.source.open_model", broken)
    done = lowbit("inspect", "x")
    assert done.code == 1
    assert done.err.startswith("lowbit: error: ZeroDivisionError: oh; this is a defect of lowbit")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left on device", "/x/y"), 1, "lowbit: error: /x/y: No space left on device\n"),
        (MemoryError(), 1, f"lowbit: error: {OUT_OF_MEMORY}\n"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), 1, f"lowbit: error: {OUT_OF_MEMORY}\n"),
        (EOFError("end"), 1, "lowbit: error: EOFError: end; this is a defect of lowbit"),
    ],
)
def test_what_reaches_the_user(
    error: BaseException, code: int, says: str, lowbit: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: str) -> None:
        raise error

    monkeypatch.setattr("lowbit.cli.source.open_model", fail)
    done = lowbit("inspect", "x")
    assert done.code == code
    assert done.err.startswith(says) and (says or done.err == "")


def test_control_c_ends_quietly(model: str, start: Run) -> None:
    process = start("chat", model, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("/reset")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_closed_pipe_is_no_error(model: str, start: Run) -> None:
    process = start("inspect", model, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_streams_closed_before_the_start(stream: int, model: str, start: Run) -> None:
    streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = start("generate", model, "-", "--max-tokens", "2", preexec_fn=lambda: os.close(stream), **streams)
    out, err = process.communicate("Hello" if stream else None, timeout=60)
    assert process.returncode == (0 if stream else 2)
    assert (out != "") == (stream == 2)
    assert {0: "the prompt is empty", 1: "[5 prompt tokens", 2: ""}[stream] in err
    assert "defect" not in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_under_stdout(model: str, start: Run) -> None:
    with Path("/dev/full").open("w") as full:
        process = start("inspect", model, stdout=full, stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "lowbit: error: No space left on device\n"


def test_interrupted_while_modules_load(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowbit.cli import start

    class Interrupts:
        """Ctrl-C while a module is looked for."""

        def find_spec(self, name: str, *rest: object) -> None:
            if name == "lowbit.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "lowbit.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupts(), *sys.meta_path])
    assert start.main() == 130
