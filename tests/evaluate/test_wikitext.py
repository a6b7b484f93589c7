"""Markup to prose, written out case by case."""

from __future__ import annotations

import time

import pytest

from lowbit.evaluate.wikitext import plain_text

CASES = {
    "bold and italics": ("'''Anarchism''' is a ''word''.", "Anarchism is a word."),
    "links": ("[[cat]]s and [[dog|hounds]], [[:Category:Birds]]", "cats and hounds, Category:Birds"),
    "files": ("Before [[File:A.jpg|thumb|A [[b|c]] in [[d]]]] after", "Before after"),
    "categories": ("Text\n[[Category:Things]]\n[[fr:Chose]]", "Text"),
    "external links": ("See [http://a.org/x the page] and [https://b.org].", "See the page and."),
    "references": ('A<ref name="x">B [[c]]</ref>, D<ref name="y"/>. E<REF>f</ref>', "A, D. E"),
    "templates": ("A {{cite|x={{y|z}}}} B {{unclosed", "A B {{unclosed"),
    "spoken templates": ("about {{convert|5|km|mi}} of {{lang|fr|''mot''}}", "about 5 km of mot"),
    "tables": ("Before\n{| class=x\n! a\n|-\n| b {{t|}} || c\n|}\nAfter", "Before\n\nAfter"),
    "comments": ("A<!-- <ref> -->B<!-- open", "AB open"),
    "entities": ("a&nbsp;b &amp; c &lt;d&gt;", "a b & c <d>"),
    "html": ("a<br/>b<sub>2</sub> <div style='x'>c</div>", "a\n\nb2 c"),
    "lists": ("* one\n** two\n# three\n: four", "one\n\ntwo\n\nthree\n\nfour"),
    "headings": ("A\n== Title ==\nB\n=== Empty ===\n== Next ==\nC", "A\n\nTitle\n\nB\n\nNext\n\nC"),
    "nested headings": ("== A ==\n=== B ===\ntext", "A\n\nB\n\ntext"),
    "back matter": ("A\n== References ==\nx\n=== Notes ===\ny\n== Legacy ==\nz", "A\n\nLegacy\n\nz"),
    "emptied brackets": ("Apollo ({{lang-el|A}}; , ) is", "Apollo is"),
    "math": ("so <math>x^2 < y</math> holds", "so holds"),
    "switches": ("__NOTOC__\nText", "Text"),
    "stray brackets": ("a ]] b }} c |} d [[ e", "a ]] b }} c |} d [[ e"),
    "letters that change length": ("İ<ref>x</ref> y", "İ y"),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_text(name: str) -> None:
    markup, prose = CASES[name]
    assert plain_text(markup) == prose


NONSENSE = ["[[", "{{", "{|\n", "<ref>", "<!--", "]]", "'''", "[http://a ", "[//", "{{a|[[b|", "<a ", "(", "( ", "==",
            "=", " ", "\n|}", "{{convert|"]  # fmt: skip


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        *((piece, "") for piece in NONSENSE),
        ("[[a|", "]]"),
        ("{{lang|a|", "}}"),
        ("\n{|", "\n|}"),
        ("{{", "\n|}"),
        ("[[", "}}"),
    ],
)
def test_nonsense_takes_linear_time(opening: str, closing: str) -> None:
    start = time.perf_counter()
    plain_text("\n{|" + opening * 10_000 + closing * 10_000)
    assert time.perf_counter() - start < 10  # a quadratic step takes a minute, a linear one a fraction of a second
