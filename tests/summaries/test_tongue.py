"""Tongues: scripts and languages of texts, code and identifiers aside."""

from __future__ import annotations

import pytest

from proxy.summaries.tongue import Tongue, tongue_of

TEXTS = {
    "English": "The user wants to book a flight and the assistant has found one that was cheap.",
    "French": "L'utilisateur a demandé un vol et l'assistant a cherché avec une assurance.",
    "German": "Der Benutzer möchte einen Flug buchen und hat nicht genug Geld für die Versicherung.",
    "Spanish": "El usuario quiere reservar un vuelo y no ha podido hacer la reserva.",
    "Portuguese": "O usuário quer reservar um voo e não quer pagar pela bagagem também.",
    "Italian": "L'utente vuole prenotare un volo per tre passeggeri e non ha questa assicurazione con sé.",
    "Dutch": "De gebruiker wil een vlucht voor drie en heeft geen verzekering van het.",
    "Turkish": "Kullanıcı bir uçuş rezervasyonu yapmak istiyor ve sigorta için çok para ödemek istemiyor.",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_is_told_by_its_small_words(language: str) -> None:
    tongue = tongue_of(TEXTS[language])
    assert tongue.script == "Latin"
    assert max(tongue.small, key=lambda name: tongue.small[name]) == language


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("用户想预订从旧金山到纽约的航班", "Chinese"),
        ("ユーザーはフライトをよやくしたい", "Japanese"),
        ("사용자가 항공편을 예약하려고 합니다", "Korean"),
        ("Пользователь хочет забронировать рейс", "Cyrillic"),
        ("المستخدم يريد حجز رحلة", "Arabic"),
        ("Ο χρήστης θέλει να κλείσει πτήση", "Greek"),
        ("订单 flight booked", ""),
        ("12345 !!", ""),
        ("", ""),
    ],
)
def test_a_script_is_that_of_more_than_half(text: str, script: str) -> None:
    assert tongue_of(text).script == script


def test_code_paths_and_identifiers_have_no_language() -> None:
    text = "查看 `the_function and the rest` src/the/and.py the.and.of user_and_the and2the 完毕"
    assert tongue_of(text) == Tongue(scripts={"Chinese": 4}, small={})
    assert tongue_of(text).size == 4
