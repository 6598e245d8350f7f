"""Markers: the words, English and Chinese, by which a sentence is known to say how things are to be done.

Strong ones are plain: must, never, only, 必须, 不要. Weak ones may be: prefer, like, 希望. It errs on the
side of weak: what is weak goes first where room is short, and what is strong goes last.

It does not know where a sentence begins or ends, nor who says it.
"""

from __future__ import annotations

import re
from typing import Final

STRONG: Final = 2
"""It says must, never, only and the like, or takes such a thing back."""
WEAK: Final = 1
"""It says prefer, like, need and the like, or asks a question that holds a rule."""

_READ: Final = 4000
"""Characters of one sentence that are looked at."""


def _small(pattern: str) -> re.Pattern[str]:
    """Return a pattern for what `_read` returns: much faster than one that ignores case."""
    return re.compile(pattern.lower())


_FORM: Final = (
    r"(?:UTC|GMT|CE?S?T|E[SD]T|P[SD]T|EUR|USD|GBP|CNY|RMB|JPY|CHF|euros?|dollars?|yuan|pounds?"
    r"|(?:Swiss )?francs?|kron(?:er|or)|(?:kilo)?grams?|(?:centi|milli)?met(?:er|re)s|inches|litres|liters"
    r"|percent"
    r"|metric|imperial|celsius|fahrenheit|kilomet(?:er|re)s?|miles|JSON|YAML|TOML|CSV|XML|Markdown|HTML|LaTeX"
    r"|PDF|plain ?text|UTF-?8|ASCII|ISO(?:[ -]?\d+)?|RFC ?\d+|English|British|American|German|French|Spanish"
    r"|Italian|Dutch|Portuguese|Polish|Russian|Arabic|Hindi|Korean|Japanese|Chinese|Mandarin|Cantonese"
    r"|(?:upper|lower|title|snake|camel|kebab|pascal)[-_ ]?case|bold|italics|bullet(?:s| points?)|tabs|spaces"
    r"|24[- ]?h(?:our)?s?|12[- ]?h(?:our)?s?|the imperative|(?:first|second|third) person|sentence case"
    r"|present tense|past tense|active voice|passive voice)"
)
"""Units, formats, languages and ways of writing."""

_BARE: Final = (
    r"(?:do not|don['’]?t|dont|only(?! (?:then|if|because|when|after|one))|avoid|refrain from"
    r"|no(?! (?:thanks|thank|problem|worries|need|idea|one\b|wait|rush|way"
    r"|further|other|more questions|longer sure|i\b|i['’]|it\b|that\b|this\b|you\b|we\b|the\b))|stop|quit"
    r"|keep(?! (?:going|on|it up|up|trying|at it))|use|prefer|leave|treat|reply|respond|answer|write|skip"
    r"|assume|omit|exclude"
    r"|include|limit|cap|stick|stay|restrict|encrypt|redact|mask|cc|bcc|call (?:me|him|her|us|them)"
    r"|address (?:me|him|her|us|them)"
    r"|ask (?:me|us|him|her|\w+ (?:first|before))|hands off|quote|cite|round|format|sign(?! in| up| out))"
)
"""How a sentence begins that tells somebody to do, or not to do, something for good."""

_STRONG_ENGLISH: Final = _small(
    r"\b(?:(?<!there )must(?:n['’]?t)?|never(?! ?mind\b)|always|shall|(?<!to )ensure|mandatory|compulsory"
    r"|forbid(?:s|den)?|prohibit(?:s|ed)?"
    r"|disallow(?:s|ed)?|nobody (?:outside|but|except)|stays where|drop support|off[- ]limits|banned|taboo"
    r"|(?:not|isn['’]t|aren['’]t) (?:allowed|permitted|acceptable|ok(?:ay)?|negotiable)|non-negotiable"
    r"|may not"
    r"|(?:is|are) (?:not )?to be|(?:is|are) (?:final|read-only|immutable|frozen|locked|confidential|fixed)"
    r"|(?<!to )make sure|(?<!ll )be sure (?:to|that)|see to it|take care (?:to|that|not)|no (?:more|less"
    r"|fewer|later|earlier|longer|newer|older"
    r"|higher|lower) than"
    r"|at (?:most|least|all times)|(?:not|never|n['’]t|cannot) (?:exceed|go (?:over|above|below|beyond))"
    r"|not to exceed"
    r"|requires?|(?:is|are) required|requirements?|(?:my|our|your|his|her|their|prior|written"
    r"|explicit) (?:approval|permission|consent|sign-?off|go-ahead)"
    r"|from now on|from here on|going forward|henceforth|in (?:the )?future,|for the rest of|(?:every"
    r"|each) time you"
    r"|(?:keep|bear) in mind|(?<!n['’]t )(?<!not )(?<!i )(?<!you )(?<!to )(?<!can )remember|don['’]?t forget"
    r"|do not forget|under no circumstances|in no case|by no means"
    r"|no matter what|without exception|without (?:asking|my|our|approval|permission)|strictly|unless"
    r"|instead of|rather than"
    r"|except (?:for|when|if|in)|with the exception of"
    r"|rules?:|that['’]s (?:the|a|our|my) rule|constraints?:|important:|note that|n\.b\.|stick (?:to|with)"
    r"|limit(?:ed)? to"
    r"|restrict(?:ed)? to|insists? (?:on|that)|let['’]?s agree|(?:we|i) agreed|call me"
    r"|(?:has|needs) to|(?<!\bi )(?<!\bwe )have to be|(?:you|they|it|this|these|those"
    r"|all [\w ]{1,30}) (?:have|need) to|(?:you|we|one) (?:can['’]?t|cannot|can not|aren['’]t|are not)"
    r"|(?:nothing|nobody|no one|none(?: of [\w ]{1,30})?) (?:may|can|should|is|gets|goes|else)|nothing else"
    r"|(?<!\bi )(?<!\bwe )should(?:n['’]t| not| be| have| contain| include| return| use| only| always"
    r"| never)(?! (?:be )?(?:fine"
    r"|ok|okay|good|enough|able|easy|possible|working|there|here|it|that|been)\b)|(?:client|customer|boss"
    r"|legal|management|company|team|vendor|wife"
    r"|husband|landlord|editor|publisher|lawyer|auditor|teacher)s? (?:hates?|dislikes?|wants?|needs?"
    r"|expects?|demands?|refuses?|asked)|due (?:on|by|date)|deadline|(?:won['’]t|can['’]?t|cannot"
    r"|does(?:n['’]t| not)|do(?:n['’]t| not)"
    r"|will not) (?:change|move|slip)"
    r"|(?:stays?|remains?) (?:the same|unchanged|as (?:it|they)|(?:\w+ )?compatible|below|under|within|above"
    r"|private|internal"
    r"|secret|confidential)|(?:keep|stay|remain) (?:below|under|within|above|out|off|away|clear)"
    r"|(?:leave|keep) [^.?!,;\n]{1,60}? (?:out|alone|as (?:it|they|is)|untouched|unchanged|in place|below"
    r"|under|within)"
    r"|budget[^.?!\n]{0,40}?\d+|(?:max(?:imum)?|min(?:imum)?)(?: of)? [$€£¥]?\d+|(?:hard|soft|upper"
    r"|lower) limit|capp?ed at"
    r"|allerg(?:y|ic|ies)|vegan|vegetarian|intoleran(?:t|ce)|kosher|halal|diabetic|coeliac|celiac"
    r"|(?:every|each|all)\b[^.?!,;\n]{1,40}? (?:needs?|gets?|goes|go|has|have|is|are)(?! you\b| i\b| we\b"
    r"| been\b)|(?:all|every|each|any)\b[^.?!,;\n]{1,50}? (?:in|as|with|using) " + _FORM + r")\b"
    r"|(?:^|[.,;:]\s)\w[\w-]*(?: [\w-]+){0,3} in " + _FORM + r"(?=[.,;!]|\s*$)|\bonly(?=[.!]?\s*$)|\b(?:is"
    r"|are) only (?:for|to)\b|,\s{0,2}(?:and |but )?not (?!sure|yet|really|bad"
    r"|a problem|that\b|to mention)\w"
    r"|\b(?:please|but|so|then|also|just|or|to)\s+(?:do not|don['’]?t|dont|avoid|refrain from)\s"
    r"|\band\s+(?:do not|don['’]?t) (?!know|think|want|have|care|mind|like)"
    r"|\b(?:please|you)\s+only\s|\b(?:please|but|just)\s+(?:keep|leave|use|stick|stay|skip|treat|ask me"
    r"|call)\s"
    r"|(?:^|[.,;:!?—–(]\s{0,2}|\s-\s)(?:please\s+|btw,? |also,? |and |just )?" + _BARE + r"\s"
)
_WITHDRAWS: Final = _small(
    r"\b(?:(?:forget|scrap|ignore|disregard|nix) (?:that|this|it|those|what i|my|the (?:rule|thing|part"
    r"|limit|deadline|restriction"
    r"|requirement|budget|constraint)|about|all that)|(?:drop|undo|cancel|revoke|strike"
    r"|lift) (?:that\b(?! \w+ (?:flight|order))|(?:the|my|our) (?:rule|limit"
    r"|deadline|restriction|requirement|budget|constraint|ban))|never ?mind|no longer (?:needed|required"
    r"|necessary|applies"
    r"|apply|valid|in force|a rule|a (?:requirement|problem|concern)|matters?|forbidden|off[- ]limits"
    r"|have to|need)|(?:n['’]t|not|never|no)\b[^.?!\n]{0,40} any ?more|(?:is|are|it['’]s|that['’]s"
    r"|would be) (?:fine|ok(?:ay)?|allowed|permitted|possible) (?:now|after all|again)"
    r"|(?:now|again) (?:fine|ok(?:ay)?|allowed|permitted)|(?:can|may) (?:now|again)|you (?:can"
    r"|may) [^.?!\n]{1,60} (?:now|again|after all)"
    r"|changed (?:my|our|his|her|their) minds?|i take (?:that|it) back|take back what|(?:rule|limit|ban"
    r"|restriction|requirement|deadline|embargo)"
    r" (?:is|was|has been) (?:lifted|dropped|gone|cancel+ed|withdrawn|moved|extended)|(?:has"
    r"|have) been (?:lifted|withdrawn|cancel+ed|revoked)"
    r"|does(?:n['’]t| not) (?:apply|matter) (?:any ?more|now))\b"
)
_WITHDRAWS_CHINESE: Final = re.compile(
    r"不用了|不必了|不需要了|不再(?:需要|要求|用|适用|有效|生效|限制|禁止|要)|取消(?=了"
    r"|[^。，\n]{0,8}(?:限制|规定|要求|规则|禁令|约束|条件))|(?:规定|要求|限制|规则|约束"
    r"|条件)[^。，\n]{0,6}取消|作废|撤销|撤回|收回|废除|解除|失效|当我没说|忘了(?:我|刚|之前|那)"
    r"|改主意|改变主意|算了|(?:刚才|之前|上面|前面)[^。！？\n]{0,12}(?:不算|不作数|忽略|不用管)"
    r"|现在(?:又)?(?:可以|能|允许)|(?:又|已经|也)(?:可以|能)[^。！？，\n]{0,12}了"
)
"""What somebody says who takes a rule back."""
_NEEDS: Final = _small(
    r"\bI (?:only|can['’]?t|cannot|don['’]?t|do not|never) (?:ever )?(?:fly|eat|drink|travel|do|take|accept"
    r"|stay|smoke|drive"
    r"|want (?:any|you|to be))\b"
    r"|\bI(?: want|['’]d like) (?:to be (?:asked|told|informed)|you to)\b|\bI['’]d rather you\b"
)
"""What somebody says of themselves that others must heed."""
_OF_ONESELF: Final = _small(
    r"\b(?:I|we)(?:['’](?:ve|d|m|re|ll)| have| had| was| were| am| are| do| did)?"
    r" (?:really |just |also |still )?(?:never|always|don['’]?t|do not|only|remember|required?|stop"
    r"|keep|use)\b"
)
"""What somebody says of themselves: seldom a rule, though it may be one."""
_WEAK_ENGLISH: Final = _small(
    r"\b(?:only|prefer\w*|should(?:n['’]?t)?|ought to|needs?(?: to)?|(?:I|we)(?:['’]d| would)? (?:want|like"
    r"|love|rather|hate|dislike)"
    r"|can['’]?t|cannot|won['’]?t|don['’]?t|do not|dont|maximum|minimum|max|min|budget|limit|until|instead"
    r"|by default"
    r"|keep|use|stick|avoid|without|as long as|whenever|important|critical|essential|crucial|please"
    r"|(?:has|have) to|hates?|dislikes?|polic(?:y|ies)|convention|style guide|offline|confidential|agreed"
    r"|(?:in|as|with|using) " + _FORM + r")\b"
)
_FAINT_ENGLISH: Final = _small(
    r"\b(?:supports?|guidelines?|standards?|not|no|private|sensitive|secret|(?:I|we)(?:['’](?:m|re|ve)| am"
    r"| are| have| need)"
    r"|my|our|we|I|me|nobody|everybody|everyone|anyone|stays?|remains?|before|after|by (?:mon|tues|wednes"
    r"|thurs|fri|satur|sun)day|first|except|every|each|all)\b"
    r"|(?:^|[.,;:!?—–(]\s{0,2})(?:please\s+)?(?:make|put|add|remove|change|set|name|send|save|store|run|test"
    r"|check|tell|show|give|let"
    r"|build|create|move|rename|replace|convert|return|follow|ignore|ask|call|count|start|end|mark|mention"
    r"|drop|hide|ship|round|log)\s|\d"
)
"""What may be a wish in what somebody wrote with their own hands, and is none in a manual that they sent."""
_STRONG_CHINESE: Final = re.compile(
    "必须|必需|必要时|务必|务须|一定要|一定不|不要(?!紧)|不得(?!不)|(?<!说)不准|不许|不可(?!思议|能)|不允许"
    "|不应|不该|禁止|严禁|禁用|切勿|忌口"
    "|请勿|勿[^\\s，。]|切记|切忌|千万|无论如何|不管怎[样么]"
    "|只能|只可|只许|只用|只要求|只需|只考虑|只接受|只坐|只住|只吃|只写|只支持|仅限|仅能|仅可|仅用|仅使用"
    "|始终|永远|永不|绝不|决不"
    "|绝对|一律|一概|统统|唯一"
    "|至少|最少|最多|至多|最晚|最迟|不超过|不超出|超过.{0,12}[须要得]|不少于|不低于|不高于|不多于|不晚于"
    "|不早于|以内|以上|以下|以后我们不"
    "|记住|记得|牢记|别忘|请用|请使用|请以|请按|请保持|改用|换成|优先|确保|务请|避免|杜绝|坚持(?:要|用|使用"
    "|不|只|让)|叫我|称呼我"
    "|从现在起|从现在开始|从今以后|从此|以后[^。！？\\n]{0,6}[都请要不别用]|今后|接下来[都请]|每次|统一|除非"
    "|否则|截止|除外|之外"
    "|上限|下限|限制在|控制在|为限|封顶|为准|保持不变|要?不变|只读|保密|机密|最终的"
    "|(?<![能我])不能(?!说|理解|确定|登录|打开|访问|不|够)|不接受|不(?:支持|允许|考虑)(?=使用|任何)"
    "|不会(?:换|变|改|付|用)|不上线|不吃|吃素|素食|过敏|清真"
    "|(?:都|均|就|也|还)(?:要|须)(?![不一二三四五六七八九十两几0-9走来哭笑死是])|(?:都|均|就"
    "|也)得(?![不过到了])|须(?:要|用|在|先|经)|要(?:用|先|按|存|带|保持|支持|兼容|以|双|经|问|由|注明|包含"
    "|遵守)|得(?:能|先|按|经)|才(?:能|可以|可)"
    "|先问|(?:批准|同意|许可|确认)(?:后|才|$|。)|需要?.{0,10}(?:批准|同意|许可)|(?:停下|停止"
    "|暂停)[来]?(?:告诉|问|等|并)|存成|保存为"
    "|(?:所有|全部|全文|一切|凡是?|任何|每(?:个|行|节|份|条|天|段|张|篇|页|封|位|人|月|周|分钟|小时"
    "|秒))[^，。？！\\n]{0,20}(?:用|为|是|以|按|要|得|须|不|存|写|只|都|均|由|加|带|超)"
    "|[，,]\\s?(?:而)?不是|而非|当(?:作)?[^，。]{0,6}处理|[动碰]都别"
    "|(?:^|[，,。；;！!：:\\s])(?:请|都|就|也|一定)?(?:假设|跳过|略过|省略|保留|使用|采用|遵守|遵循|抄送|叫"
    "|称呼|不写|不加)"
    "|(?:^|[，,。；;！!：:\\s请万可就都也先还])别(?![的人处墅称名样离扭致国家])"
    "|(?<![个特分区级性类识鉴送告判])别(?:动|碰|写|放|用|给|发|改|删|提|叫|再|让|把|点|加|去|做|说|问|管"
    "|出现|超|乱|随便|直接|在|上|买|订|选|推)"
)
_ADDED_CHINESE: Final = re.compile(
    "预算[^。！？\\n]{0,8}\\d|没空|我(?:不|只|没法|不能)(?:吃|喝|坐|住|抽|接受|出差|开车)"
    "|应(?:该|当)?(?=返回|使用|用|按|以|包含|采用|为)"
    "|(?:法务|客户|老板|公司|领导|合同|法律|甲方|老师|编辑|规范)[^，。\\n]{0,4}(?:要求|规定|不喜欢|希望|讨厌)"
    "|只(?:发|给|准|收|看|放|留|选)|保留.{0,4}位|不再支持|保持不|(?<!我)不(?:加|写|放|带|显示|出现)"
    "|不用(?![了谢担麻着客管说想急太户再])|(?:^|[，,。；\\s])[^，。！？\\s我你他她想]{0,8}"
    "(?<![使作费信不有没能可会试采利通常运套])用(?![户品途处完过了的到来心])[^，。]{1,8}(?=[。；！，,\\n]|$)"
)
"""Rules that are said by a turn of phrase."""
_WEAK_CHINESE: Final = re.compile(
    "一定|要求|希望|应该|应当|需要|最好|尽量|想要|我要|不能|注意|总是|一直|保证|默认|预算|忌|不想|不喜欢"
    "|讨厌|不用|不必|请|只|仅|别|保持|使用|没空"
)
_FAINT_CHINESE: Final = re.compile(
    "\\d|保留|隐藏|返回|命名|叫|空出|要|得能|能用|不|之前|以前|以后|先|[用按以]|所有|全部|都|为|改|我|喜欢"
)
_COMMANDS: Final = _small(
    r"\b(?:ignore|disregard|forget|override|bypass|discard)\b[^.!?\n]{0,60}\b(?:instructions?|prompts?"
    r"|rules?|directions"
    r"|guidelines|messages?|context|user|everything|above|said)\b|\b(?:system|assistant"
    r"|developer)\s{0,2}(?:prompt|message)?\s{0,2}[:：]"
    r"|\byou are now\b|\bnew (?:\w+ )?(?:instructions?|rules?|polic(?:y|ies))\b[^.\n]{0,30}:|\bfrom now on\b"
    r"|\bthe (?:assistant|model|agent|ai)"
    r" (?:must|should|shall|will|may)\b|\b(?:reply|respond|answer) (?:with|only)\b|\bwithout (?:asking"
    r"|confirmation)\b"
    r"|\b(?:do not|don['’]t|never) (?:tell|inform|alert|ask|mention)\b|<\|[a-z_]{2,20}\|>|\[/?INST\]"
    r"|</?(?:system|user|transcript|summary)\b"
    r"|(?:忽略|无视|忘记|忘掉|不要理会|不用管|抛弃)[^。！？\n]{0,15}(?:指令|指示|提示|规则|要求|命令|内容"
    r"|以上|之前)"
    r"|从现在(?:起|开始)|你现在是|用户规定|不要(?:再)?(?:告诉|告知|通知|询问)用户|系统(?:提示|消息|指令)"
)
"""How a text speaks that wants a model to obey it."""
_QUESTION: Final = re.compile(r"[?？][\"'”’)）]*\s*$")
_CHINESE: Final = re.compile("[\u3400-\u9fff]")
_LATIN: Final = re.compile("[a-z]")


def strength_of(sentence: str, *, closely: bool = False) -> int:
    """Return how strongly a sentence states a rule, or takes one back; 0 where it does neither.

    Args:
        sentence: One sentence; of a very long one the beginning is read.
        closely: Whether small words count too, as in what somebody wrote with their own hands.
    """
    read = _read(sentence)
    if _marker_of(read) is not None:
        return WEAK if _QUESTION.search(read) else STRONG
    if _LATIN.search(read):
        if _WEAK_ENGLISH.search(read) or _OF_ONESELF.search(read):
            return WEAK
        if closely and _FAINT_ENGLISH.search(read):
            return WEAK
    if _CHINESE.search(read) and (_WEAK_CHINESE.search(read) or (closely and _FAINT_CHINESE.search(read))):
        return WEAK
    return 0


def marker_of(sentence: str) -> re.Match[str] | None:
    """Return what makes a sentence a strong rule, but for what somebody says of themselves."""
    return _marker_of(_read(sentence))


def withdraws(text: str) -> bool:
    """Tell whether a text takes a rule back."""
    return _withdrawal(_read(text)) is not None


def commands(text: str) -> bool:
    """Tell whether a text of somebody else orders a model about: what is quoted must not be obeyed."""
    return _COMMANDS.search(_read(text)) is not None


def _read(text: str) -> str:
    """Return what is read of a text, in small letters, each of its characters in its place."""
    beginning = text[:_READ]
    small = beginning.lower()
    return small if len(small) == len(beginning) else beginning


def _marker_of(read: str) -> re.Match[str] | None:
    if (found := _withdrawal(read)) is not None:
        return found
    if _LATIN.search(read):
        if (found := _NEEDS.search(read)) is not None:
            return found
        own = _OF_ONESELF.search(read)
        others = read
        if own is not None:
            others = read[: own.start()] + " " * (own.end() - own.start()) + read[own.end() :]
        if (found := _STRONG_ENGLISH.search(others)) is not None:
            return found
    if _CHINESE.search(read):
        return _STRONG_CHINESE.search(read) or _ADDED_CHINESE.search(read)
    return None


def _withdrawal(read: str) -> re.Match[str] | None:
    found = _WITHDRAWS.search(read) if _LATIN.search(read) else None
    return found or (_WITHDRAWS_CHINESE.search(read) if _CHINESE.search(read) else None)
