"""Texts to evaluate on: named ones that come inside installed packages, and files.

No text is part of lowbit. A named text lies in a package that is found without importing it.
"""

from __future__ import annotations

import bz2
import importlib.util
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lowbit.errors import LowbitError, UsageError
from lowbit.evaluate.wikitext import plain_text

MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class Text:
    """A text and where it is from. `complete` says whether it is the whole source or its beginning."""

    name: str
    source: str  # a sentence's part: what it is, from where, under which licence
    content: str = field(repr=False)
    complete: bool = True


@dataclass(frozen=True)
class PackagedText:
    """A text inside a package: how to find it and how to turn the file into pieces of plain text."""

    package: str
    file: str  # inside the package
    source: str
    install: str  # the command that installs the package
    pieces: Callable[[Path], Iterator[str]]


def _wikipedia_articles(path: Path) -> Iterator[str]:
    """Title and prose of each article in a MediaWiki export (XML, bz2); redirects and talk pages left out."""
    with bz2.open(path, "rb") as file:
        title, namespace = "", ""
        for _, element in ElementTree.iterparse(file):
            tag = element.tag.rpartition("}")[2]
            if tag == "title":
                title = element.text or ""
            elif tag == "ns":
                namespace = element.text or ""
            elif (
                tag == "text" and namespace == "0" and not (element.text or "").lstrip().lower().startswith("#redirect")
            ):
                if prose := plain_text(element.text or ""):
                    yield f"{title}\n\n{prose}"
            elif tag == "page":
                element.clear()


TEXTS: dict[str, PackagedText] = {
    "wikipedia": PackagedText(
        package="gensim",
        file="test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
        source="articles of the English Wikipedia of 2016 without markup, from the package gensim (CC BY-SA)",
        install="pip install --no-deps gensim==4.4.0",
        pieces=_wikipedia_articles,
    ),
}


def load_text(name_or_path: str | os.PathLike[str], *, characters: int | None = None) -> Text:
    """A named text ("wikipedia") or the text in a UTF-8 file.

    characters: stop at the end of the article (or, in a file, of the paragraph) in which that many are reached.
    Raises UsageError for a name that is neither, LowbitError for a package that is not installed, and for files that
    cannot be read or hold no text.
    """
    name = os.fspath(name_or_path)
    if name in TEXTS:
        return _packaged(name, TEXTS[name], characters)
    path = Path(name).expanduser()
    if not path.exists():
        raise UsageError(f"text {name!r} is neither a file nor a named text: the named ones are {', '.join(TEXTS)}")
    return _from_file(path, characters)


def _packaged(name: str, text: PackagedText, characters: int | None) -> Text:
    spec = importlib.util.find_spec(text.package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    path = next((p for place in places if (p := Path(place) / text.file).is_file()), None)
    if path is None:
        state = f"has no {text.file}" if places else "is not installed"
        raise LowbitError(f"text {name!r} lies in the package {text.package}, which {state}: run {text.install}")
    try:
        content, complete = _take(text.pieces(path), characters)
    except (OSError, EOFError, ElementTree.ParseError) as error:
        raise LowbitError(f"{path} is damaged ({error}): run {text.install} --force-reinstall") from error
    return Text(name, text.source, content, complete)


def _take(pieces: Iterator[str], characters: int | None) -> tuple[str, bool]:
    taken: list[str] = []
    length = 0
    for piece in pieces:
        if characters is not None and length >= characters:
            return "\n\n\n".join(taken), False
        taken.append(piece)
        length += len(piece)
    return "\n\n\n".join(taken), True


def _from_file(path: Path, characters: int | None) -> Text:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise UsageError(f"text {path} has {size} bytes: at most {MAX_BYTES} are read; pass a part of it")
        if path.is_char_device() or path.is_block_device():
            raise UsageError(f"text {path} is a device, which may never end: pass a file")
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LowbitError(f"text {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LowbitError(
            f"text {path} is not UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error
    if not content.strip():
        raise UsageError(f"text {path} is empty: perplexity needs some text")
    end = len(content) if characters is None else content.find("\n\n", characters)
    end = len(content) if end < 0 else end
    return Text(path.name, f"the file {path}", content[:end], complete=end == len(content))
