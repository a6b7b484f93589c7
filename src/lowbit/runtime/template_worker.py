"""The process in which chat templates run. Started by chat_template.py as a script; never imported by lowbit.

A chat template is a program from a stranger. jinja2's immutable sandbox keeps it from reaching Python's internals, but
not from looping forever or asking for terabytes; and should the sandbox ever leak, there must be nothing to reach. So
it runs here, with limits that the operating system keeps: address space, CPU seconds, no files to be opened or written
(so no sockets and no programs either). The parent keeps the time and kills.

One request per line of standard input, one reply per line of standard output, both JSON:
    {"source": str, "variables": {...}, "most_characters": int, "seconds": int}
    {"text": str} or {"error": "refused" | "template" | "length" | "memory", "message": str}
The first line written is {"text": "ready"}, or an error when jinja2 cannot be imported.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

EXTRA_BYTES = 256 << 20  # address space beyond that of the started process


def main() -> None:
    sys.path.extend(sys.argv[1:])  # where jinja2 and markupsafe are; the process starts without site-packages
    replies = sys.stdout.buffer
    try:
        environment = make_environment()
    except ImportError as error:
        send(replies, {"error": "template", "message": str(error)})
        return
    limit_everything()
    send(replies, {"text": "ready"})
    compiled: dict[str, Template] = {}  # the one template last asked for
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            limit_cpu(request["seconds"])
            template = compiled.get(request["source"])
            if template is None:
                compiled.clear()
                template = compiled[request["source"]] = environment.from_string(request["source"])
            reply = {"text": render(template, request["variables"], request["most_characters"])}
            send(replies, reply)
        except MemoryError:
            request = reply = {}
            send(replies, {"error": "memory", "message": f"it needs more than {EXTRA_BYTES >> 20} MiB"})
        except TooLong as error:
            send(replies, {"error": "length", "message": str(error)})
        except Refused as error:
            send(replies, {"error": "refused", "message": str(error)[:2000]})
        except Exception as error:
            send(replies, {"error": "template", "message": f"{type(error).__name__}: {error}"[:2000]})


class Refused(Exception):
    """The template called raise_exception: it does not accept these messages."""


class TooLong(Exception):
    """The text grew past its bound."""


def make_environment() -> SandboxedEnvironment:
    """jinja2 as chat templates expect it: whitespace trimmed, loop controls, and the usual helpers."""
    # Modules that jinja2 would import when it first needs them: later no file can be opened any more.
    import datetime
    import pprint  # noqa: F401
    import textwrap  # noqa: F401
    import time

    import jinja2.debug  # noqa: F401
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """{% generation %} ... {% endgeneration %} marks the assistant's words for training: its body, as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: object) -> None:
        raise Refused(message)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own escapes <, > and & for HTML; a prompt must hold them as they are.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def plain_dict(*pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now, dict=plain_dict)
    environment.from_string("{{ [1] | tojson }}{{ strftime_now('%Y') }}").render()
    time.localtime()  # the C library reads the time zone's file now
    return environment


def render(template: Template, variables: dict[str, object], most: int) -> str:
    parts: list[str] = []
    size = 0
    for part in template.generate(**variables):
        size += len(part)
        if size > most:
            raise TooLong(f"it writes more than {most} characters")
        parts.append(part)
    return "".join(parts)


def limit_everything() -> None:
    """Limits for the rest of the process's life. Without the resource module (Windows) the parent's clock remains."""
    try:
        import resource
    except ImportError:
        return

    def limit(what: int, value: int) -> None:
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))

    if sys.platform == "linux":
        with open("/proc/self/statm") as file:  # noqa: PTH123
            pages = int(file.read().split()[0])
    limit(resource.RLIMIT_NOFILE, 3)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere the kernel does not hold to it
        limit(resource.RLIMIT_AS, pages * resource.getpagesize() + EXTRA_BYTES)


def limit_cpu(seconds: int) -> None:
    """This request may compute for `seconds`; a worker whose parent has died ends by this."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    value = int(used.ru_utime + used.ru_stime) + seconds + 1
    resource.setrlimit(resource.RLIMIT_CPU, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def send(stream: BinaryIO, reply: dict[str, str]) -> None:
    stream.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
