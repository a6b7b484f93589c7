"""Texts: the packaged one, files, and what is said when they are not there."""

from __future__ import annotations

import bz2
import importlib
import importlib.machinery
import sys
from pathlib import Path

import pytest

from lowbit.errors import LowbitError, UsageError
from lowbit.evaluate import TEXTS, load_text
from lowbit.evaluate.texts import _wikipedia_articles

EXPORT = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>Old</title><ns>0</ns><revision><text>#REDIRECT [[New]]</text></revision></page>
<page><title>Talk:New</title><ns>1</ns><revision><text>chatter</text></revision></page>
<page><title>New</title><ns>0</ns><revision><text>'''New''' is &lt;b&gt;better&lt;/b&gt;.</text></revision></page>
<page><title>Empty</title><ns>0</ns><revision><text>{{stub}}</text></revision></page>
<page><title>Last</title><ns>0</ns><revision><text>The last one.</text></revision></page>
</mediawiki>"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package gensim that fails when it is imported, with a small export in it."""
    root = tmp_path / "site" / "gensim"
    file = root / TEXTS["wikipedia"].file
    file.parent.mkdir(parents=True)
    (root / "__init__.py").write_text("raise AssertionError('imported')")
    file.write_bytes(bz2.compress(EXPORT.encode()))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    importlib.invalidate_caches()
    return file


def test_articles_without_redirects_talk_and_stubs(package: Path) -> None:
    assert list(_wikipedia_articles(package)) == ["New\n\nNew is better.", "Last\n\nThe last one."]


def test_a_packaged_text_is_found_without_importing_the_package(package: Path) -> None:
    text = load_text("wikipedia")
    assert text.content == "New\n\nNew is better.\n\n\nLast\n\nThe last one."
    assert text.complete and "CC BY-SA" in text.source
    assert "gensim" not in sys.modules


def test_as_many_articles_as_asked_for(package: Path) -> None:
    text = load_text("wikipedia", characters=5)
    assert text.content == "New\n\nNew is better." and not text.complete


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.PathFinder])
    with pytest.raises(LowbitError) as error:
        load_text("wikipedia")
    assert str(error.value) == (
        "text 'wikipedia' lies in the package gensim, which is not installed: run pip install --no-deps gensim==4.4.0"
    )


def test_a_damaged_package_is_reported(package: Path) -> None:
    package.write_bytes(bz2.compress(EXPORT.encode())[:-20])
    with pytest.raises(LowbitError, match="is damaged"):
        load_text("wikipedia")
    package.write_bytes(bz2.compress(EXPORT[:300].encode()))
    with pytest.raises(LowbitError, match="is damaged"):
        load_text("wikipedia")
    package.unlink()
    with pytest.raises(LowbitError, match="gensim, which has no test/test_data"):
        load_text("wikipedia")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("One é.\n\nTwo.\n\nThree.", encoding="utf-8")
    assert load_text(path).content == "One é.\n\nTwo.\n\nThree."
    part = load_text(str(path), characters=8)
    assert part.content == "One é.\n\nTwo." and not part.complete
    assert part.source == f"the file {path}"


@pytest.mark.parametrize(
    ("content", "says"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe\x00", "is not UTF-8")]
)
def test_bad_files(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    with pytest.raises(LowbitError, match=says):
        load_text(path)


def test_a_device_that_never_ends() -> None:
    with pytest.raises(UsageError, match="text /dev/zero is a device, which may never end: pass a file"):
        load_text("/dev/zero")


def test_a_name_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="text 'wikitext' is neither a file nor a named text: the named ones are wikipedia"
    ):
        load_text("wikitext")
    with pytest.raises(LowbitError, match="cannot be read: Is a directory"):
        load_text(tmp_path)
