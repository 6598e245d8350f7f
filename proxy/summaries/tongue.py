"""Tongues: in which script and language a text is written, as far as that can be told by counting.

Scripts are told by their characters; languages of Latin script by small words that hardly any other of them
has. It does not know what the texts are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

_SCRIPTS: Final[Mapping[str, re.Pattern[str]]] = {
    "Latin": re.compile("[A-Za-z\u00c0-\u024f\u1e00-\u1eff]{2,}"),
    "Chinese": re.compile("[\u3400-\u9fff]"),
    "Japanese": re.compile("[\u3040-\u30ff]"),
    "Korean": re.compile("[\uac00-\ud7af]"),
    "Cyrillic": re.compile("[\u0400-\u04ff]{2,}"),
    "Greek": re.compile("[\u0370-\u03ff]{2,}"),
    "Arabic": re.compile("[\u0600-\u06ff]{2,}"),
    "Hebrew": re.compile("[\u0590-\u05ff]{2,}"),
    "Devanagari": re.compile("[\u0900-\u097f]{2,}"),
    "Thai": re.compile("[\u0e00-\u0e7f]"),
}
"""Words of a script, or its characters where it has no spaces."""
_WORD: Final = re.compile(r"[^\W\d_]+")
_QUOTED_CODE: Final = re.compile(r"`[^`\n]{1,200}`")
_RUN: Final = re.compile("[!-~]+")
_NO_WORD: Final = re.compile(r"[/\\_@=\d]|\w\.\w")
"""What a run of ASCII without space holds that is a path, an identifier or code: it has no language."""

_SMALL: Final[Mapping[str, frozenset[str]]] = {
    language: frozenset(words.split())
    for language, words in {
        "English": "the and of to that with was were for is are it this by from has have been which not "
        "they their "
        "be an or at but then after before into what there would should you your",
        "French": "le les et est une dans pour que qui avec pas du au aux cette ont été sont vous nous "
        "elle mais "
        "leur ses sur il ce l qu avait était puis où",
        "German": "der das und ist nicht ein eine zu den dem von mit für auf im sich wurde wurden "
        "werden hat haben "
        "auch nach bei oder wird dass aus noch",
        "Spanish": "el los las y una del se por con para su fue está han más pero como sobre lo al este "
        "esta también "
        "usuario ha es",
        "Portuguese": "os um uma não com dos das foi ao em pelo pela são mais você também seu sua está",
        "Italian": "il di che è un gli della delle dei sono stato con non alla nel per ha più anche "
        "questo questa",
        "Dutch": "het een van en niet zijn voor met dat te aan wordt werd heeft naar ook bij deze door",
        "Swedish": "och att det som på är av för den inte till har med ett om kan",
        "Polish": "nie na się z że jest jak po dla przez oraz został są",
        "Turkish": "ve bir bu için ile da de olarak olan çok daha kullanıcı sonra ancak",
        "Indonesian": "dan yang di untuk dengan ini itu tidak dari telah pada akan pengguna adalah",
        "Vietnamese": "và của là được cho không các với trong đã người này một có",
    }.items()
}
"""Small words of languages in Latin script, in small letters."""
_OF_MANY: Final = frozenset(
    word
    for word, languages in Counter(word for words in _SMALL.values() for word in words).items()
    if languages > 1
)


class Tongue(NamedTuple):
    """What a text is written in."""

    scripts: Mapping[str, int]
    """Words, or characters, of each script."""
    small: Mapping[str, int]
    """Small words of each language in Latin script, those of several languages not among them."""

    @property
    def size(self) -> int:
        """Words and characters in all."""
        return sum(self.scripts.values())

    @property
    def script(self) -> str:
        """The script of more than half of it; empty where none is."""
        name = max(self.scripts, key=lambda each: self.scripts[each], default="")
        return name if name and 2 * self.scripts[name] > self.size else ""


def tongue_of(text: str) -> Tongue:
    """Return what a text is written in, code and identifiers aside."""
    prose = _RUN.sub(_word_or_space, _QUOTED_CODE.sub(" ", text))
    scripts = {name: len(found) for name, words in _SCRIPTS.items() if (found := words.findall(prose))}
    words = Counter(_WORD.findall(prose.lower()))
    small = {
        language: hits
        for language, known in _SMALL.items()
        if (hits := sum(words[word] for word in known - _OF_MANY))
    }
    return Tongue(scripts=scripts, small=small)


def _word_or_space(run: re.Match[str]) -> str:
    """Return a run as it is, or nothing for one that is no word."""
    return " " if _NO_WORD.search(run.group()) else run.group()
