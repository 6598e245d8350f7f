"""Words of alarm, in English and Chinese."""

from __future__ import annotations

import pytest

from proxy.textscan.alarm import alarms


@pytest.mark.parametrize(
    "text",
    [
        "ERROR: disk full", "Warning: old", "Traceback (most recent call last):", "ValueError: x",
        "java.lang.NullPointerException",
        "Permission denied", "connection timed out", "request timeout", "permission 權限錯誤",
        "Segmentation fault", "404 Not Found", "panic: runtime", "KILLED", "操作失败", "发生错误",
        "警告：磁盘", "连接超时", "it FAILED",
    ],
)  # fmt: skip
def test_what_tells_of_something_gone_wrong(text: str) -> None:
    assert alarms(text)


@pytest.mark.parametrize("text", ["", "all is well", "200 OK", "已完成", "成功", "x" * 1_000_000])
def test_what_does_not(text: str) -> None:
    assert not alarms(text)
