"""Ten typical tool outputs, for the table of docs/strategies.md and for tests."""

from __future__ import annotations

import csv
import io
import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha512
from typing import Final

NAMES: Final = ("orders", "billing", "accounts", "search", "mailer", "export", "session", "webhook")


def _diff() -> str:
    hunks = [
        f"@@ -{at},13 +{at},13 @@ def handle_{name}(request):\n"
        + "".join(f"     value_{line} = request.get({name!r}, {line})\n" for line in range(6))
        + f"-    return reply({name}, 200)\n+    return reply({name}, 201)\n"
        + "".join(f"     log_{line}({name!r}, value_{line})\n" for line in range(6))
        for at, name in enumerate(NAMES, start=40)
    ]
    return (
        "diff --git a/src/api.py b/src/api.py\nindex 3f1c2aa..9b7d010 100644\n--- a/src/api.py\n+++ b/src/api.py\n"
        + ("".join(hunks))
    )


def _listing() -> str:
    folders = [
        f"./src/{name}:\ntotal {40 + at}\n"
        + "".join(
            f"-rw-r--r-- 1 builder staff {1200 + 37 * line * at:6} Mar {at + 1:2} 09:{line:02} {name}_{line}.py\n"
            for line in range(12)
        )
        for at, name in enumerate(NAMES)
    ]
    return "\n".join(folders)


def _grep() -> str:
    return "".join(
        f"src/services/{name}/{name}_handler.py:{12 + 9 * at}:    raise Refused({name!r}, reason={at})\n"
        for name in NAMES
        for at in range(9)
    )


def _pytest() -> str:
    passed = "".join(f"tests/test_{name}.py::test_case_{at} PASSED\n" for name in NAMES for at in range(12))
    return (
        f"===== test session starts =====\ncollected 97 items\n\n{passed}tests/test_export.py::test_rows FAILED\n\n"
        "===== FAILURES =====\n    def test_rows():\n>       assert rows('x') == 3\nE       assert 2 == 3\n\n"
        "tests/test_export.py:31: AssertionError\n===== 1 failed, 96 passed in 4.31s =====\n"
    )


def _npm() -> str:
    steps = "".join(
        f"npm http fetch GET 200 https://registry.example/{name}-{at} {at}ms\n" for name in NAMES for at in range(12)
    )
    end = "npm warn deprecated mailer-2@1.0.0: use mailer-3\n\nadded 96 packages in 12s\n"
    return f"{steps}{end}2 high severity vulnerabilities\n"


def _java() -> str:
    frames = "".join(
        f"\tat org.springframework.web.Filter{at}.doFilter(Filter{at}.java:{100 + at})\n" for at in range(40)
    )
    return (
        "java.lang.IllegalStateException: no such order: A-1042\n\tat com.shop.Orders.find(Orders.java:88)\n"
        f"\tat com.shop.Api.order(Api.java:31)\n{frames}Caused by: java.sql.SQLException: connection refused\n"
        "\tat com.shop.Pool.take(Pool.java:54)\n"
    )


def _html() -> str:
    menu = "".join(f'<li class="item"><a href="/{name}" class="link">{name.title()}</a></li>' for name in NAMES)
    body = "".join(f"<p>Order A-{1000 + at} was sent on 2026-03-{at + 1:02}.</p>" for at in range(12))
    head = "<head><title>Orders</title><style>" + ".item{margin:0 auto;padding:4px}" * 30 + "</style></head>"
    return f"<!doctype html><html>{head}<body><ul>{menu}</ul>{body}<footer><ul>{menu}</ul></footer></body></html>"


def _records() -> list[dict[str, object]]:
    return [
        {"id": f"A-{1000 + at}", "customer": NAMES[at % 8], "total": 19.5 + at, "status": "sent" if at % 3 else "open"}
        for at in range(60)
    ]


def _csv() -> str:
    out = io.StringIO()
    rows = csv.DictWriter(out, fieldnames=list(_records()[0]), lineterminator="\n")
    rows.writeheader()
    rows.writerows(_records())
    return out.getvalue()


def _base64() -> str:
    data = b"".join(sha512(bytes([at])).digest() for at in range(60))
    return f"logo.png, 3840 bytes:\n{b64encode(data).decode()}\n"


OUTPUTS: Final[Mapping[str, str]] = {
    "git diff": _diff(),
    "ls -lR": _listing(),
    "grep -n": _grep(),
    "pytest -v": _pytest(),
    "npm install": _npm(),
    "Java trace": _java(),
    "HTML page": _html(),
    "JSON list": json.dumps({"orders": _records()}, indent=2),
    "CSV": _csv(),
    "base64": _base64(),
}
