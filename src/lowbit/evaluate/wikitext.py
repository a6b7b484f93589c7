"""Wikipedia's markup to plain prose: what a reader of the article sees, without boxes, notes, tables and pictures.

Written for evaluation texts, not as a renderer: templates are dropped except the few that carry words of a sentence.
Time is linear in the length of the article, whatever it holds; brackets that do not match stay as they are.
Source of the syntax: https://www.mediawiki.org/wiki/Help:Formatting and Help:Links.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

# Elements whose content is not prose.
_DROPPED = ("ref", "references", "math", "chem", "gallery", "timeline", "score", "imagemap", "source",
            "syntaxhighlight", "pre", "table", "hiero", "graph")  # fmt: skip
_OPEN_TAG = re.compile(rf"<({'|'.join(_DROPPED)})\b([^<>]*)>", re.IGNORECASE)
_COMMENT = re.compile(r"<!--")
_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,1000}>")
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_EXTERNAL = re.compile(r"\[(?:https?:)?//[^\s\]]{0,500}(?:[ \t]([^\]\n]{0,1000}))?\]")
_QUOTES = re.compile(r"'{2,5}")
_SWITCH = re.compile(r"__[A-Z]+__")
_HEADING = re.compile(r"(={2,6})([^=\n].*?)\1\s*")
_ITEM = re.compile(r"[*#:;]+\s*")
_HIDDEN_LINK = re.compile(r"\s*(file|image|media|category|[a-z]{2,3}|wikt|s|commons|simple)\s*:", re.IGNORECASE)
_EMPTY_BRACKETS = re.compile(r"\(\s*(?:[,;:.]\s*)*\)|\[\s*\]")
_SPACES = re.compile(r"[ \t\u00a0]+")
_SPACE_BEFORE = re.compile(r" +([,.;:!?)])")

_BACK_MATTER = frozenset(
    {"references", "external links", "see also", "further reading", "notes", "bibliography", "footnotes", "sources",
     "citations", "notes and references", "gallery"}
)  # fmt: skip

# Templates that are words of a sentence: which of their unnamed arguments are shown.
_SPOKEN: dict[str, slice] = {
    "convert": slice(0, 2),
    "lang": slice(1, 2),
    "transl": slice(-1, None),
    "nowrap": slice(0, 1),
    "quote": slice(0, 1),
    "blockquote": slice(0, 1),
    "cquote": slice(0, 1),
}

_DEEPEST = 12  # levels of brackets in brackets that are followed; what is deeper is dropped
_BRACES = re.compile(r"\{\{|\}\}|^:*\{\||^\|\}(?!\})", re.MULTILINE)
_BRACKETS = re.compile(r"\[\[|\]\]")


def plain_text(markup: str) -> str:
    """The prose of an article: paragraphs separated by empty lines, headings on lines of their own."""
    text = _cut(markup, _COMMENT, lambda match: "-->")
    text = _cut(text, _OPEN_TAG, lambda match: None if match[2].endswith("/") else f"</{match[1].lower()}>")
    text = _replace_pairs(text, _BRACES, _template)
    text = _replace_pairs(text, _BRACKETS, _link)
    text = _EXTERNAL.sub(lambda match: (match[1] or "").strip(), text)
    text = _TAG.sub("", _BREAK.sub("\n", text))
    text = _SWITCH.sub("", _QUOTES.sub("", text))
    return _paragraphs(html.unescape(text))


def _cut(text: str, opening: re.Pattern[str], closing: Callable[[re.Match[str]], str | None]) -> str:
    """Remove from each opening to the closing text that belongs to it, or the opening alone where there is none."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters change length; tags are ASCII, so their places must not
        lowered = text
    kept, at, absent = [], 0, set()
    while match := opening.search(text, at):
        kept.append(text[at : match.start()])
        at = match.end()
        end = closing(match)
        if end is None or end in absent:
            continue
        found = lowered.find(end, at)
        if found < 0:
            absent.add(end)
        else:
            at = found + len(end)
    return "".join((*kept, text[at:]))


Replace = Callable[[str, str, int], str]  # (opening, inner, depth) -> text


def _replace_pairs(text: str, marks: re.Pattern[str], replace: Replace, depth: int = 0) -> str:
    """Replace every outermost pair of brackets by replace(opening, inner, depth)."""
    if depth > _DEEPEST:
        return ""
    spans: list[tuple[int, int, int, int]] = []  # outer start, inner start, inner end, outer end
    stack: list[re.Match[str]] = []
    opened = {"{{": 0, "{|": 0, "[[": 0}  # how many of each are on the stack
    for match in marks.finditer(text):
        mark = match[0].lstrip(":")
        if mark in opened:
            stack.append(match)
            opened[mark] += 1
            continue
        wanted = {"}}": "{{", "|}": "{|", "]]": "[["}[mark]
        if not opened[wanted] or (mark == "|}" and stack[-1][0].lstrip(":") != wanted):
            continue
        while True:  # what was opened inside and never closed is text
            opening = stack.pop()
            kind = opening[0].lstrip(":")
            opened[kind] -= 1
            if kind == wanted:
                break
        while spans and spans[-1][0] > opening.start():
            spans.pop()
        spans.append((opening.start(), opening.end(), match.start(), match.end()))
    parts, at = [], 0
    for start, inner, stop, end in spans:
        parts += [text[at:start], replace(text[start:inner].lstrip(":"), text[inner:stop], depth + 1)]
        at = end
    return "".join((*parts, text[at:]))


def _template(opening: str, inner: str, depth: int) -> str:
    if opening != "{{":
        return ""
    name, *arguments = _split(inner)
    shown = _SPOKEN.get(name.strip().lower())
    if shown is None:
        return ""
    unnamed = [a for a in arguments if not re.match(r"\s*\w+\s*=", a)]
    return " ".join(_replace_pairs(a.strip(), _BRACES, _template, depth) for a in unnamed[shown])


def _link(opening: str, inner: str, depth: int) -> str:
    if _HIDDEN_LINK.match(inner):
        return ""
    target, *labels = _split(inner)
    label = labels[-1] if labels else ""
    return _replace_pairs(label or target.removeprefix(":"), _BRACKETS, _link, depth)


def _split(inner: str) -> list[str]:
    """Split at the bars that stand in no inner bracket."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\[\[|\]\]|\{\{|\}\}|\|", inner):
        if match[0] == "|":
            if depth == 0:
                parts.append(inner[start : match.start()])
                start = match.end()
        else:
            depth = max(0, depth + (1 if match[0] in {"[[", "{{"} else -1))
    return [*parts, inner[start:]]


def _paragraphs(text: str) -> str:
    """Lines to paragraphs; headings without text under them, and whole sections of back matter, are left out."""
    blocks: list[str] = []
    headings: list[tuple[int, str]] = []  # waiting for text under them
    skipped: int | None = None  # level of the section being left out
    for raw in text.splitlines():
        line = _SPACES.sub(" ", raw).strip()
        if match := _HEADING.fullmatch(line):
            level, title = len(match[1]), match[2].strip()
            if skipped is not None and level > skipped:
                continue
            skipped = level if title.lower() in _BACK_MATTER else None
            headings = [h for h in headings if h[0] < level]
            if skipped is None:
                headings.append((level, title))
            continue
        if skipped is not None or line.startswith(("|", "!", "{|")):
            continue
        line = _EMPTY_BRACKETS.sub("", _ITEM.sub("", line, count=1) if _ITEM.match(line) else line)
        line = _SPACE_BEFORE.sub(r"\1", _SPACES.sub(" ", line)).strip()
        if not any(c.isalnum() for c in line):
            continue
        blocks += [title for _, title in headings]
        headings = []
        blocks.append(line)
    return "\n\n".join(blocks)
