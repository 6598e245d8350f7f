"""Words that tell of something gone wrong, in English and Chinese.

What holds one is shown whatever else is left out. It errs on the side of showing: "0 errors" has one too.
It does not know where the words stand.
"""

from __future__ import annotations

import re
from typing import Final

_WORDS: Final = re.compile(
    r"abort|cannot|can't|could not|couldn't|crash|critical|denied|deprecat|error|exception|fail|fatal"
    r"|forbidden|invalid|killed|missing|not found|out of memory|panic|refused|rejected|segfault"
    r"|segmentation fault|severe|stack trace|time[d]? ?out|traceback|unable|unauthori[sz]ed|unreachable|warn"
    r"|错误|失败|异常|警告|告警|报错|出错|超时|拒绝|致命|崩溃|无法|中断|终止|无效|缺失|未找到|不存在|未授权"
    r"|錯誤|失敗|異常|逾時|拒絕|無法"
)
"""Each a literal or nearly so: a search is one pass."""


def alarms(text: str) -> bool:
    """Tell whether a text holds such a word."""
    return _WORDS.search(text.lower()) is not None
