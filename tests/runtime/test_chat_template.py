"""Chat templates: equal to transformers' rendering; whatever a hostile one does is an error within seconds."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lowbit.errors import ModelError, UsageError
from lowbit.runtime import ChatTemplate, chat_template

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "kind"; don\'t ü 日.'},
    {"role": "user", "content": "Hello\n  there"},
    {"role": "assistant", "content": "Hi!", "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, None]}}}]},
    {"role": "user", "content": "Bye"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a<b", "parameters": {"type": "object"}}}]

TEMPLATES = {
    "plain": "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "whitespace": """
    {%- for message in messages %}
        {% if loop.first and message.role != 'system' %}
            {{- bos_token + 'none' }}
        {% endif %}
        {{- '[' ~ loop.index0 ~ '] ' + message['content'] | trim }}
        {%- if not loop.last %}{{ eos_token }}{% endif %}
    {% endfor %}
    """,
    "tools": "{{ tools | tojson }}{{ tools | tojson(indent=2) }}"
    "{% for t in tools %}{{ t.function | tojson(separators=(',', ':')) }}{% endfor %}"
    "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(seen=0, last='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.seen = ns.seen + 1 %}{% set ns.last = m.content %}{% endif %}{% endfor %}{{ ns.seen }} {{ ns.last }}",
    "macro": "{% macro turn(m, end='\n') %}{{ m.role | upper }}: {{ m.content }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{{ turn(m, '|') }}{% endfor %}",
    "loop-controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "tests": "{{ messages[0].content is string }}{{ tools is defined }}{{ nothing is defined }}{{ documents is none }}"
    "{{ messages[1:] | map(attribute='role') | join(',') }}{{ 'x' in messages[0] }}{{ dict(a=1) | items | list }}",
    "date": "{{ strftime_now('%Y') }}{{ strftime_now is defined }}",
    "thinking": "{{ 'no' if enable_thinking is defined and enable_thinking is false else 'yes' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(name: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": prompt, "enable_thinking": False}
    rendered, _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )
    ours = ChatTemplate(TEMPLATES[name], "<s>", "</s>").render(MESSAGES, tools=TOOLS, **options)
    assert ours == rendered[0]
    assert ours


def test_filters_that_load_modules_have_them() -> None:
    """The process cannot open files any more when a template runs, and so import nothing."""
    template = ChatTemplate("{{ 'ab cd' | wordwrap(2) }}{{ [1] | pprint }}{{ 'x.org' | urlize }}{{ [2] | random }}")
    assert template.render(MESSAGES).startswith("ab\ncd[1]")


def test_the_date_is_the_local_one() -> None:
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(MESSAGES) == datetime.now().strftime("%d %b %Y")


def test_a_second_rendering_takes_milliseconds() -> None:
    template = ChatTemplate(TEMPLATES["plain"])
    template.render(MESSAGES)
    fastest = min(timed(template)[1] for _ in range(10))
    assert fastest < 0.05


def timed(template: ChatTemplate) -> tuple[str, float]:
    start = time.perf_counter()
    try:
        return template.render(MESSAGES), time.perf_counter() - start
    except (ModelError, UsageError) as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - start


MEMORY = "it needs more than 256 MiB"
HOSTILE = {
    "attribute": ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__' of 'str' object is"),
    "subclasses": ("{{ ().__class__.__base__.__subclasses__() }}", "SecurityError"),
    "globals": ("{{ strftime_now.__globals__['os'] }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append' of 'list' object is unsafe"),
    "include": ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    "range": ("{{ range(10 ** 12) | list }}", "OverflowError: Range too big"),
    "string": ("{{ 'a' * 10 ** 10 }}", MEMORY),
    "list": ("{{ [1] * 10 ** 10 }}", MEMORY),
    "width": ("{{ '%9999999999d' % 1 }}", MEMORY),
    "format-width": ("{{ '{:9999999999}'.format(1) }}", MEMORY),
    "center": ("{{ 'x' | center(10 ** 10) }}", MEMORY),
    "replace": ("{{ ('a' * 10 ** 5) | replace('a', 'b' * 10 ** 5) | length }}", MEMORY),
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        MEMORY,
    ),
    "long-text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "it writes more than 8388608 characters"),
    "nesting": ("{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}", "RecursionError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "syntax": ("{% for %}", "TemplateSyntaxError: Expected an expression, got 'end of statement block'"),
    "undefined": ("{{ nothing.at.all }}", "UndefinedError: 'nothing' is undefined"),
}
ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 7 ** (10 ** 9) }}",
    "filter": "{{ (range(99999) | list * 99) | sort | unique | list | length }}"
    "{% for i in range(99999) %}{% if range(99999) | sum %}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 20)  # it is not the clock that stops these, even on a busy machine
    source, reason = HOSTILE[name]
    message, seconds = timed(ChatTemplate(source))
    assert message.startswith(f"ModelError: the model's chat template failed: {reason}")
    assert message.endswith("; use another copy of the model, or write the prompt yourself with generate()")
    assert seconds < 10  # the machine may be busy; alone it is a fraction of a second


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | map(attribute='__class__') | first }}",
        "{{ messages | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ namespace.__init__ }}",
        "{{ lipsum }}{{ cycler }}{{ joiner }}",
    ],
)
def test_escapes_that_lead_nowhere(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == ""


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    template = ChatTemplate(ENDLESS[name])
    template.start()
    message, seconds = timed(template)
    assert message == (
        "ModelError: the model's chat template failed: it was not done after 0.5 seconds; "
        "use another copy of the model, or write the prompt yourself with generate()"
    )
    assert seconds < 10
    assert template._worker is None  # the process was killed


def test_after_a_failure_it_works_again() -> None:
    template = ChatTemplate("{{ 'a' * messages | length * 10 ** 8 if messages | length > 1 else 'ok' }}")
    for _ in range(2):
        with pytest.raises(ModelError, match=MEMORY):
            template.render(MESSAGES)
        assert template.render(MESSAGES[:1]) == "ok"


def test_the_process_cannot_open_files_or_start_programs(tmp_path: Path) -> None:
    """What would be left if the sandbox itself failed."""
    worker = Path(chat_template.__file__).with_name("template_worker.py")
    script = f"""
import sys, os, json
sys.path.insert(0, {str(worker.parent)!r})
import template_worker
template_worker.limit_everything()
failed = []
for attempt in (lambda: open("/etc/hostname"), lambda: open({str(tmp_path / "x")!r}, "w"), os.pipe):
    try:
        attempt()
    except OSError:
        failed.append(True)
print(json.dumps([len(failed), os.system("true")]))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    failures, exit_status = json.loads(out)
    assert failures == 3 and exit_status != 0


def test_a_template_may_refuse() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"
    with pytest.raises(UsageError) as error:
        ChatTemplate(source).render(MESSAGES)
    assert str(error.value) == (
        "the model's chat template refuses these messages: System role not supported; "
        "change their roles, order or content accordingly"
    )
    assert ChatTemplate(source).render(MESSAGES[1:]) == "ok"


def test_source_is_bounded() -> None:
    with pytest.raises(ModelError) as error:
        ChatTemplate("x" * 262_145)
    assert str(error.value) == (
        "the chat template has 262145 characters: at most 262144 are run; "
        "use another copy of the model, or write the prompt yourself with generate()"
    )


def test_a_killed_process_is_replaced() -> None:
    template = ChatTemplate("{{ messages | length }}")
    assert template.render(MESSAGES) == "4"
    assert template._worker is not None
    template._worker._process.kill()
    template._worker._process.wait()
    assert template.render(MESSAGES) == "4"


def test_the_process_ends_with_the_template() -> None:
    template = ChatTemplate("{{ messages | length }}")
    template.render(MESSAGES)
    assert template._worker is not None
    process = template._worker._process
    assert process.poll() is None
    del template
    gc.collect()
    assert process.poll() is not None


def test_a_fork_starts_its_own_process() -> None:
    template = ChatTemplate("{{ messages | length }}")
    template.render(MESSAGES)
    assert template._worker is not None
    template._worker._owner = os.getpid() + 1  # as a forked child sees it
    first = template._worker
    assert template.render(MESSAGES) == "4"
    assert template._worker is not first


def test_threads_share_one_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    wrong: list[str] = []

    def run(name: str) -> None:
        for turn in range(20):
            content = f"{name}-{turn}"
            if template.render([{"role": "user", "content": content}]) != content:
                wrong.append(content)

    threads = [threading.Thread(target=run, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def bad_messages() -> Iterator[Any]:
    yield "Hello"
    yield []
    yield {"role": "user", "content": "x"}
    yield None
    yield [{"content": "x"}]
    yield [{"role": "user", "content": 5}]
    yield ["Hello"]


@pytest.mark.parametrize("messages", list(bad_messages()), ids=str)
def test_malformed_messages(messages: Any) -> None:
    with pytest.raises(UsageError, match=r"^messages(\[0\])?=.*: must be "):
        ChatTemplate("x").render(messages)


def test_messages_that_are_not_plain_data() -> None:
    with pytest.raises(UsageError, match=r"^messages and template variables must be plain JSON data \(Object of type"):
        ChatTemplate("x").render([{"role": "user", "content": "x", "image": object()}])


def test_message_sentences() -> None:
    with pytest.raises(UsageError) as error:
        ChatTemplate("x").render([])
    assert str(error.value) == (
        'messages=[]: must be a list of at least one message, such as [{"role": "user", "content": "Hello"}]'
    )
    with pytest.raises(UsageError) as error:
        ChatTemplate("x").render(["Hello"])  # type: ignore[list-item]
    assert str(error.value) == (
        "messages[0]='Hello': must be a dict with a role (a text: user, assistant, system, ...) and content "
        "(a text, or a list of parts)"
    )
