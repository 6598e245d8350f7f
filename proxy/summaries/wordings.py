"""How orders are worded, English and Chinese: the patterns by which `orders` tells them from reports.

Patterns and nothing else: what each of them means stands where it is used.
"""

from __future__ import annotations

import re
from typing import Final

TASKS: Final = re.compile(
    r"\b(?:goals?|tasks?|objectives?|aims?|next|to[- ]?dos?|open|plans?|planned|pending|remain\w*"
    r"|outstanding"
    r"|steps?|requests?|asked for|left to do|what is left|unfinished)\b"
    r"|目标|任务|下一步|待办|计划|未完成|后续|请求|需求|接下来|步骤",
    re.IGNORECASE,
)
"""What a heading or a label says under which it is said what is to be done."""
_RULE: Final = (
    r"(?:rules?|constraints?|instructions?|polic(?:y|ies)|guidelines?|restrictions?|directives?"
    r"|requirements?"
    r"|prompts?|safeguards?|conditions?|orders|directions|what (?:the )?(?:user|customer|client|owner"
    r"|operator)"
    r" (?:\w+ ){0,2}(?:laid down|said|asked|wanted|wants|told|ordered|forbade|demanded))"
)
_WHOSE: Final = (
    r"(?:all|any|every|each|these|those|your|(?:the )?(?:user|customer|client|operator)['’]s|user"
    r"|earlier"
    r"|previous|prior|above|former|original|initial|system|safety|existing|other|of)"
)
_VOID: Final = (
    r"(?:null|void|obsolete|outdated|invalid|overrid\w+|overruled|superseded|revoked|withdrawn|lifted"
    r"|suspended"
    r"|rescinded|waived|expired|cancell?ed|repealed|scrapped|dropped|removed|replaced|annulled)"
)
_TECHNICAL: Final = (
    r"(?<!lint )(?<!eslint )(?<!css )(?<!firewall )(?<!key )(?<!unique )(?<!null )(?<!check )(?<!validation )"
    r"(?<!routing )(?<!database )(?<!schema )(?<!build )(?<!pip )(?<!package )(?<!version )(?<!type )"
)
"""What makes a rule or constraint one of programs."""
SYSTEM: Final = re.compile(
    r"\A[\s#*>-]*(?-i:\[(?:SYSTEM|ADMIN|OVERRIDE|DEVELOPER)\])|<\|[a-z_]{2,20}\|>|\[/?(?:INST|SYS)\]"
    r"|<</?SYS>>|</?(?:system|transcript|conversation|instructions?)\b[^>\n]{0,40}>"
    r"|\A[\s#*>-]*(?-i:SYSTEM|OVERRIDE|ADMIN)\s*[:：]"
    r"|\A[\s#*>-]*(?:system|admin(?:istrator)?|developer|operator|root)"
    r" (?:message|prompt|override|notice|note|instruction|command|update|alert)s?\s*[:：]"
    r"|\bnew (?:system )?instructions?\s*[:：]"
    r"|\A[\s#*>-]*(?:important |urgent )?(?:note|message|instructions?|reminder|attention|memo|orders?"
    r"|command)\s+(?:to|for)\s+"
    r"(?:the |any |all |whichever |every )?(?:next |reading |future )?"
    r"(?:assistants?|models?|ais?|agents?|llms?|readers?|chatbots?|bots?)\b[^:：.\n]{0,30}[:：-]"
    r"|\byou are now\b|\byou are (?:the|an?|my|our) (?:\w+ )?(?:admin\w*|root|developer"
    r"|unrestricted \w+|pirate)\b"
    r"|\b(?:act|behave|answer) as (?:if|though) you\b|\bpretend (?:to be|that you|you)\b"
    r"|你现在是|你不再是|从现在(?:起|开始)[，,]?\s?你|\A[\s#*>-]*(?:系统(?:消息|提示|指令|通知|公告|命令)|管理员|开发者)\s*[:：]"
    r"|\A[\s#*>-]*系统\s*[:：](?=[^\n]*(?:必须|一律|请|作废|不要|立即|马上|你|全部|所有))"
    r"|\A[\s#*>-]*(?:助手|模型|AI|智能体)请?注意\s*[:：]|\A[\s#*>-]*(?:致|给|告)(?:下一个|后续)?(?:助手|模型|AI|智能体"
    r"|读者)的?(?:说明|提示|提醒|指令|话|通知)?\s*[:：]",
    re.IGNORECASE,
)
"""What speaks as the system does, or to the model that reads."""
LIFTS: Final = re.compile(
    # to be ignored
    r"(?P<english>\b(?:ignore|disregard|forget|override|bypass|discard|overlook|set aside"
    r"|pay no (?:attention|heed) to"
    r"|stop (?:following|obeying)|(?:do not|don['’]t|no longer|need not|never) (?:follow|obey|observe"
    r"|heed|apply))\b"
    r"(?! of\b)[^.!?;\n]{0,40}?(?:\b(?:instructions?|directions|guidelines|directives|safeguards)\b"
    rf"|\b(?:{_WHOSE}|the rest of|what)\s+(?:{_WHOSE}\s+){{0,3}}(?:messages?|context|text|prompts?"
    r"|rules?|constraints?|polic(?:y|ies)"
    r"|restrictions?|requirements?|conditions?)\b"
    r"|\b(?:everything|anything|all|what was said)(?: said| stated| written)? (?:above|before|so far"
    r"|earlier)|\bthe above\b"
    r"|\bwhat (?:the )?(?:user|customer|client|operator)\b)"
    rf"|\A\W*(?:please |just |now )*(?:ignore|disregard|forget|bypass|break) the (?:{_RULE})\b)"
    # void
    rf"|\b(?:none|not one) of (?:\w+(?:['’]s)? ){{0,3}}{_RULE} (?:now )?(?:appl\w+|holds?|binds?"
    r"|counts?|matters?|stands?)\b"
    rf"|\bno (?:more )?{_RULE} (?:any ?more|any longer|now)\b"
    rf"|\b{_WHOSE} (?:\w+ )?{_RULE}\s*[:：–-]+\s*{_VOID}\b"
    rf"|\b(?:{_WHOSE}\s+(?:\w+\s+){{0,3}}?{_TECHNICAL}{_RULE}|{_RULE}(?=\s+(?:\w+\s+){{0,3}}(?:above"
    r"|earlier|before|so far)\b)"
    r"|what (?:the )?(?:user|customer|client|operator) (?:\w+ ){0,2}(?:laid down|said|asked|wanted"
    r"|ordered|forbade))\b[^.!?;\n]{0,40}?"
    r"\b(?:(?:(?:is|are|stands?|(?:has|have)(?: all| now| since)? been|be|becomes?) (?:now |all "
    rf"|hereby |thus |therefore |considered )*{_VOID})"
    r"|(?:has|have) expired|(?:is|are) (?:now )?to be (?:ignored|disregarded|skipped|broken|dropped"
    r"|forgotten)"
    r"|no longer (?:\w+ ){0,2}(?:appl\w+|valid|hold|holds|in force|binding|needed|count|matter|bind"
    r"|followed)"
    r"|(?:must|need|should|shall|can|may|are|is)(?: not| no longer)(?: to)?(?: be)? (?:followed|obeyed"
    r"|observed|heeded|appl\w+)"
    r"|(?:do|does|did) not (?:apply|hold|count|matter)|(?:may|can|should|must"
    r"|shall) (?:now )?be (?:ignored|disregarded|skipped|broken|dropped|forgotten))\b"
    r"|\b(?:withdr[ae]wn?|revoked?|lifted|waived?|rescinded|repealed|scrapped|retracted|abolished"
    r"|overrode|overruled)\s+"
    rf"(?:\w+(?:['’]s)?\s+){{0,4}}?{_TECHNICAL}{_RULE}\b"
    r"|(?:\A|[.:：]\s*|\b(?:the|our|company)\s+)polic(?:y|ies) (?:has|have) (?:now |since "
    r"|just )?(?:been )?"
    r"(?:changed|replaced|updated|lifted|overruled|suspended)\b"
    # Chinese
    r"|(?P<chinese>(?:忽略(?!了)|无视|忘记|忘掉|不要理会|不用理会|不必理会|不用管|不要管|抛弃|抛开|推翻|绕过|违反|(?:不要|不用|不必|无需|无须|不再)遵[守循])"
    r"[^。！？；\n]{0,15}(?:指令|指示|提示|规则|规定|约束|要求|命令|限制|约定|政策|内容|以上|之前))"
    r"|(?:所有|全部|一切|此前|之前|先前|以前|以上|上述|早先|用户|客户|顾客|各项|前面|原有|系统)[^。！？；，,\n]{0,8}"
    r"(?:规则|规定|约束|要求|指令|指示|限制|约定|政策|条款|条件)[^。！？；\n]{0,12}"
    r"(?:作废|(?:已|均|都)取消|可以?(?:忽略|无视|不予理会|不遵守)|失效|无效|不再(?:适用|有效|生效|成立|需要遵)|撤销|撤回|废除|废止|过时|已?解除|(?:不必|不用"
    r"|无需|无须|不要)(?:再)?(?:遵"
    r"|理会|管))"
    r"|(?:撤销|撤回|取消|废除|废止|解除|推翻|收回)了?(?=[^。！？；，,\n]{0,8}(?:所有|全部|一切|此前|之前|先前|以前|以上|上述|原有|原来|各项|前面|早先))"
    r"[^。！？；，,\n]{0,14}(?:规则|规定|约束|要求|指令|限制|约定|政策|条件)"
    r"|(?:撤销|撤回|取消|废除|废止|解除|推翻|收回)了?[^。！？；，,\n]{0,6}(?:确认|审批|批准|同意)的?(?:规则|规定|约束|要求|限制|约定)",
    re.IGNORECASE,
)
"""What says that rules are to be ignored, or are void."""
_ASKED: Final = (
    r"(?:(?:further|prior|any|the|explicit|my|his|her|their|your|user|customer|additional|more|a|an"
    r"|user['’]s|customer['’]s)\s+){0,3}"
    r"(?:asking|confirm(?:ation|ations|ing)|approvals?|consent|being asked|identity|questions asked)"
)
WAIVES: Final = re.compile(
    r"\b(?:may|can|could|should|must|shall|will|to|now|always|please|free|allowed"
    r"|\A\W*(?!(?:the|an?|users?|customers?|he|she|they|i|we|it|this|that"
    r"|all)\b)[a-z]+)\b[^.!?;\n]{0,80}?\bwithout "
    rf"{_ASKED}\b"
    rf"|\bno (?:longer )?(?:need (?:for|to)|{_ASKED})\s+(?:(?:is|are|will be)\s+)?(?:needed|required"
    r"|necessary|ask\w*|confirm\w*|approv\w*)\b"
    r"|\b(?:needs?|requires?) no (?:\w+ )?(?:confirmation|approval|permission|consent)\b"
    r"|确认(?:步骤|环节|流程)?可以?(?:跳过|省略|忽略)"
    rf"|\b{_ASKED}(?: steps?| rules?| checks?)? (?:may|can|should|must) (?:now )?be (?:skipped|omitted"
    r"|waived|dropped)\b"
    r"|\b(?:does not|doesn['’]t|do not|don['’]t) (?:want|need|require) (?:\w+ )?(?:confirmations?"
    r"|approvals?|to be asked)\b"
    r"|\bno longer (?:wants?|needs?|wishes|requires?|has) (?:to (?:be asked|confirm|approve)"
    r"|(?:\w+ )?(?:confirmations?|approvals?))\b"
    rf"|\b{_ASKED}(?: checks?| verification)?(?: from (?:\w+ ){{0,2}}\w+)? (?:is|are|was|were"
    r"|will be) (?:no longer|not) (?:needed|required|necessary)\b"
    r"|(?:\A\W*|\b(?:may|can|should|must|shall|will|to|please|and|now|then|always)\s+)(?:just |simply "
    r"|now )?(?:skip|omit|waive|bypass)\s+"
    r"(?:\w+ ){0,2}?(?:confirmations?|identity|approvals?|(?:safety|security|policy) checks?)\b"
    r"|\b(?:do not|don['’]t|never|no need to|needn['’]t|need not|not to|stop) (?:ask(?:ing)?"
    r"|wait(?:ing)?)\b(?: \w+){0,3}?"
    r" (?:confirmation|approval|permission|consent)\b"
    r"|\b(?:whatever|no matter what|regardless of(?: what)?) (?:the |any "
    r"|company )?(?:\w+ )?(?:polic(?:y|ies)|rules?|guidelines)\b"
    r"|(?:\A\W*|[,:：]\s*|\b(?:please|always|must|shall|to|and|then|should|now|will)\s+)(?:approve"
    r"|grant|authori[sz]e)\s+"
    r"(?:all|every|any|each|everything|whatever)\b"
    r"|\b(?:assistants?|agents?|models?|you) (?:should|must|may|can|shall|is to|are to"
    r"|will)\b[^.!?;\n]{0,30}\b(?:approve|grant|refund|pay)\b"
    r"[^.!?;\n]{0,40}\b(?:automatically|unconditionally|without question)\b"
    r"|\b(?:every|all|any) (?:\w+ )?(?:refunds?|requests?|payments?|claims?|compensations?"
    r"|cancellations?) (?:gets?|must be|shall be|should be|be|is)\s+"
    r"(?:approved|granted|paid|accepted|authori[sz]ed)\b"
    r"|\balways (?:approve|grant|authori[sz]e|refund|pay)\b"
    r"|(?:\A\W*|[.,:：]\s*|\b(?:please|always|must|shall|and|then)\s+)(?:give|issue|grant|pay"
    r"|offer)\s+(?:full|unlimited|free|immediate)\s+refunds\b"
    r"|\b(?:refunds?|requests?|payments?|claims|compensations?|changes|cancellations)\s+(?:are|is"
    r"|must be|should be|will be|have to be)\s+"
    r"(?:now |hereby )?(?:always|automatically|all)\s+(?:to be )?(?:approved|granted|allowed|paid"
    r"|accepted|authori[sz]ed)\b"
    r"|\bblanket (?:approval|permission|consent|authority)\b"
    r"|(?:一律|全部|全都|统统|无条件|自动)(?:予以|给予|要)?(?:批准|通过|同意|退款|放行|授权|赔付)"
    r"|不(?:要|用|必)?再(?:询?问|打扰|征求)(?:用户|客户|顾客)|(?:不经|未经|无需|无须|不用|不必|不需要?|免去|跳过|省略)[^。！？；，,\n]{0,6}?"
    r"(?:确认|审批|批准|同意|验证身份|身份验证|核对身份|身份核[验实]|询问|再问|请示|征求)",
    re.IGNORECASE,
)
"""What says that nobody need be asked, or that all is to be approved."""
SWEEPING: Final = ("一律", "全部", "全都", "统统", "无条件", "自动", "不再", "不要再", "不用再", "不必再")
"""With these words it is all that is waived."""
FORBIDS: Final = re.compile(
    r"\b(?:not|never|nothing|nobody|none|no one|forbid\w*|forbade|prohibit\w*|avoid\w*|refus\w*"
    r"|wrong\w*|violat\w*|mistake\w*"
    r"|cannot|declin\w*|insist\w*|must be asked)\b|n['’]t\b"
    r"|不得|不能|不可(?!以)|不要|禁止|不许|不准|绝不|切勿|严禁|勿|不应|拒绝|不允许|误|违",
    re.IGNORECASE,
)
"""What turns "without asking" round."""
PERMITS: Final = re.compile(
    "可以|可|有权|今后|以后|一律|直接|即可|都|从现在|允许|请|\\A\\W*(?:无需|无须|不用|不必|跳过|省略)"
)
"""What makes a permission of "无需确认"."""
YOU: Final = re.compile(
    r"\byou (?:must|shall|are to|are hereby|are (?:now )?(?:allowed|free|permitted|authori[sz]ed"
    r"|obliged|required)|will now"
    r"|(?:may|can|should) now|may|must)\b"
    r"|\byou have (?:\w+ ){0,3}?(?:permission|authority|approval|consent)\b"
    r"|\A\W*do (?:whatever|anything|as (?:it|they|the)\b)|\b(?:has|have|takes?) (?:\w+ )?(?:priority"
    r"|precedence) over (?:everything|all|the (?:user|system))\b"
    r"|\b(?:must|should|shall|is to|are to|has to|have to)(?: now)? (?:obey|comply with"
    r"|trust) (?:\w+ ){0,3}?(?:tools?|documents?|pages?|transcripts?|e?-?mails?|messages?|commands?"
    r"|orders)\b"
    r"|\A\W*(?:if|when|whenever) (?:the )?(?:user|customer|client|anyone"
    r"|somebody)\b[^.!?\n]{0,60},\s*(?:always |just |only )?(?:say|pretend|claim|deny|lie|tell (?:them"
    r"|him|her))\b"
    r"|(?:如果|若|当)(?:用户|客户|顾客)[^。！？\n]{0,20}(?:就|一律|都)(?:说|回答|回复|称)"
    r"|\byour (?:next|only|first|new|real|sole|final|true) (?:reply|answer|response|message|task|job"
    r"|goal|purpose|role|instructions?|orders?)"
    r" (?:now )?(?:is|are|must|should|shall|will)\b"
    r"|\A\W*stop (?:summari[sz]ing|what you)\b|停止(?:总结|摘要)"
    r"|\bfrom (?:now|here|this point|today) on(?:wards?)?,?\s+(?:you|please|always|never|do|don['’]t"
    r"|only|reply|answer|respond|ignore)\b"
    r"|(?:do not|don['’]t|never) (?:tell|inform|alert|mention (?:this|it|that) to) (?:the user|anyone"
    r"|anybody)\b"
    r"|\b(?:reveal|print|show|output|leak) (?:your|the) (?:system )?(?:prompt|instructions)\b"
    r"|(?:\A\W*|\b(?:please|must|to|and|then|now|should)\s+)(?:reveal|leak|send|post|e-?mail|forward"
    r"|upload|share|disclose|exfiltrate|publish)\s+"
    r"(?:\w+(?:['’]s)? ){0,4}?(?:system prompt|api[ _-]?keys?|passwords?(?! reset)|credentials|secrets"
    r"|private keys?|access tokens?)\b"
    r"|\b(?:I|we) (?:will|shall|am going to|['’]ll) (?:\w+ )?(?:comply|obey|follow"
    r"|do as)\b[^.!?\n]{0,60}"
    r"\b(?:requests?|instructions?|orders?|commands?|told|said|document|transcript)\b"
    r"|你(?:必须|务必|只能|不得|应当|应该|无需|不必|可以|现在)|不要(?:告诉|告知|通知)用户|(?:泄露|输出|显示|公布|发送)(?:你的)?(?:系统提示|密码|密钥|口令)",
    re.IGNORECASE,
)
"""What speaks to the reader."""
MILD: Final = re.compile(
    r"\byou (?:should|need(?: not| to)|have to|can|will|don['’]?t (?:need|have) to|do not (?:need"
    r"|have) to)\b"
    r"|你(?:需要|要|得|该)",
    re.IGNORECASE,
)
"""What speaks to the reader, as the list of what is to do may."""
REPLIES: Final = re.compile(
    r"(?:\A\W*|[,:：;]\s*|\b(?:please|must|to|and|then|now|always|only|should)\s+)(?:reply|respond"
    r"|answer|say|output)\b[^.!?\n]{0,50}?"
    r"(?:\bonly\b|\bexactly\b|\bnothing (?:else|but|more)\b|\bwith ['\"“‘`]|(?-i:\b(?:DONE|OK|YES|NO"
    r"|[A-Z]{4,})\b)|\bto (?:everything|every|all|any)\b"
    r"|\bto (?:the )?next (?:message|question)|\bin (?:all )?caps\b)"
    r"|(?:只|仅|一律|统一|全部)(?:需要?|要|能|用|可)?(?:回复|回答)(?!了|过)|\A\W*请?(?:只|直接)?(?:回复|输出)[“\"「'‘]",
    re.IGNORECASE,
)
"""What bids what to reply."""
_DOING: Final = (
    r"(?:delete|erase|wipe|destroy|purge|remove|approve|grant|refund|cancel|pay|transfer|send|forward"
    r"|upload|publish|post"
    r"|share|give|call|invoke|run|execute|deploy|push|book|buy|order|reply|respond|answer|say|print"
    r"|output|write|repeat"
    r"|install|download|disable|enable|open|visit|click|follow|obey|use|treat|act|ignore|tell|ask|stop"
    r"|accept|allow|skip|return|translate|email|e-mail|contact)"
)
BIDS: Final = re.compile(
    rf"\A\W*(?:(?:please|now|then|just|simply|always|immediately|also|assistant|agent|model|ai|important"
    rf"|urgent)\s*[,:]?\s+){{0,3}}{_DOING}\s+(?:the|all|every|any|each|your|this|that|these|those|a|an"
    r"|it|them|everything|him|her|me"
    r"|us|as|to|in|with|only|at once|now|immediately|no|nothing|anything|full)\b"
    r"|\A\W*please,?\s+(?!note\b)[a-z]+\b"
    r"|\A\W*(?:请(?!求|假|教|客|问)|立即|立刻|马上|务必|现在就?)[^。！？\n]{2,3}",
    re.IGNORECASE,
)
"""What begins with a verb that bids."""
SWEEPS: Final = re.compile(
    r"(?:\A\W*|[,:：;]\s*|\b(?:please|must|and|then|now)\s+)(?:delete|erase|wipe|destroy|purge|transfer"
    r"|send|forward|upload|publish|give)\s+"
    r"(?:\w+ ){0,2}?(?:all|every|everything|the (?:whole|entire))\b[^.!?\n]{0,80}"
    r"|(?:\A\W*|[，,：:；]|请|要|立即|马上|直接)(?:删除|清空|销毁|发送|转发|上传|公开|转账)[^。！？，,；\n]{0,4}(?:所有|全部"
    r"|一切)[^。！？，,；\n]{0,20}",
    re.IGNORECASE,
)
"""What is done to all of something: whoever bids it must be the user, even in the list of what is to do."""
USER: Final = re.compile(
    r"\b(?:users?|customers?|clients?|owner|he|she|they|operator)\b|用户|客户|顾客|他|她", re.IGNORECASE
)
"""Who may lift a rule."""
SOMEBODY: Final = re.compile(
    r"\b(?:pages?|tools?|outputs?|results?|mails?|e-?mails?|messages?|documents?|files?|transcripts?"
    r"|texts?|comments?|readme|web ?sites?"
    r"|sites?|logs?|agents?|attackers?|injections?|articles?|policy|policies|systems?|assistants?"
    r"|tickets?|answers?|reviews?|posts?|reply"
    r"|notes?|letters?|descriptions?|prompts?|instructions?|vendor|seller|team|lines?|code|function"
    r"|script|error|warning|data|content"
    r"|[A-Z]\w+)\b|网页|页面|工具|结果|邮件|消息|文档|文件|文本|评论|网站|日志|助手|内容|文章|公告|系统|卖家|商家|接口|数据",
)
"""Who else may be reported to have said something."""
TELLS: Final = re.compile(
    r"\b(?:ask(?:s|ed|ing)?|said|says?|saying|told|tells?|telling|claim(?:s|ed|ing)?|want(?:s|ed|ing)?"
    r"|request(?:s|ed|ing)?|instruct(?:s|ed|ing)?"
    r"|demand(?:s|ed|ing)?|contain(?:s|ed|ing)?|tr(?:y|ies|ied|ying)|attempt(?:s|ed|ing)?|urg(?:es|ed"
    r"|ing)|insist(?:s|ed|ing)?|order(?:s|ed|ing)"
    r"|suggest(?:s|ed|ing)?|propos(?:es|ed|ing)|stat(?:es|ed|ing)|not(?:es|ed|ing)|reads?|reading"
    r"|refus(?:es|ed|ing)|declin(?:es|ed|ing)"
    r"|explain(?:s|ed|ing)?|warn(?:s|ed|ing)?|recommend(?:s|ed|ing)?|advis(?:es|ed|ing)|remind(?:s|ed"
    r"|ing)?|repl(?:ies|ied)|answered|wrote|writes"
    r"|allow(?:s|ed)|permit(?:s|ted)|agreed|decided|mention(?:s|ed|ing)?|called for|according to"
    r"|wished|wishes|prefers?|preferred|means|meant"
    r"|pointed out|instructions? (?:of|from|in)|require[sd])\b"
    r"|要求|请求|说|表示|提出|希望|想要|称|写道|写着|声称|提到|指示|命令|建议|让|请助手|询问|认为|(?:政策|公司|法律|合同)规定|显示|试图|企图|包含|含有|提醒|告知"
    r"|解释|允许|同意",
    re.IGNORECASE,
)
"""Verbs that report."""
WITHDRAWS: Final = re.compile(
    r"\b(?:forget|ignore|disregard|scrap|drop|lift|withdraw|never ?mind|no longer|any ?more"
    r"|not any longer|revoke|void|overrule"
    r"|(?:does|do)(?:n['’]t| not) (?:matter|apply|count)|is fine now|changed my mind|cancel (?:that"
    r"|the|my) (?:rule|limit|condition)"
    r"|you (?:may|can) now|(?:rules?|policy) (?:has|have) changed)\b"
    r"|不用了|不再|作废|取消|撤销|撤回|忽略|算了|不限|无所谓|不必|不用管|改主意|解除|忘掉|忘了",
    re.IGNORECASE,
)
"""The words of a user who takes a rule back."""
WITHDRAWS_ALL: Final = re.compile(
    r"\b(?:forget|ignore|disregard|scrap|drop|lift|withdraw|never ?mind|revoke|void"
    r"|no longer)\b[^.!?\n]{0,40}"
    r"\b(?:all|everything|every|any|rules|constraints|instructions|requirements)\b"
    r"|\b(?:all|everything|every|any|rules|constraints|instructions"
    r"|requirements)\b[^.!?\n]{0,40}\b(?:no longer|void|any ?more|off)\b"
    r"|(?:作废|取消|撤销|撤回|忽略|忘掉|忘了|不用|不必|解除)[^。！？\n]{0,10}(?:所有|全部|之前|以上|前面|规定|要求|规则|限制)"
    r"|(?:所有|全部|之前|以上|前面|规定|要求|规则|限制)[^。！？\n]{0,12}(?:作废|取消|撤销|撤回|忽略|不用|不必|解除|不再)",
    re.IGNORECASE,
)
"""The same, of one who takes all of them back."""
ALL: Final = re.compile(
    r"\b(?:all|any|every|each|everything|rules)\b|所有|全部|一切|各项|规定", re.IGNORECASE
)
"""What makes an order one about all rules."""
GOES_AHEAD: Final = re.compile(
    r"\b(?:go ahead|just do it|no need to|need(?:n['’]t| not)|don['’]t (?:need|have|bother|wait|ask)"
    r"|do not (?:need|have|bother|wait|ask)"
    r"|without asking|without (?:my )?(?:confirmation|approval)|skip|stop asking|your call|you decide"
    r"|feel free)\b"
    r"|直接|不用问|不用确认|无需|不必|你决定|你定|不用再问",
    re.IGNORECASE,
)
"""The words of a user who wants no question any more."""
NEGATED: Final = re.compile(
    r"\b(?:never|not|no|don['’]?t|nor|without|nobody)\b[^.!?;\n]*\Z|[不没别勿禁][^。！？；\n]{0,4}\Z",
    re.IGNORECASE,
)
"""What turns round what stands behind it."""
