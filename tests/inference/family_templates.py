"""Chat templates in the manner of recent model families: markers, order, roles, forms of calls.

They are small ones, written from facts about public configuration files.
"""

from __future__ import annotations

# Channels, a developer turn, tools as a TypeScript namespace, one call per turn, today's date.
GPT_OSS = """
{%- macro type_of(schema) -%}
{%- if schema.type == 'integer' -%}number
{%- elif schema.type == 'array' -%}{{ type_of(schema['items']) }}[]
{%- elif schema.enum -%}{{ schema.enum | map('tojson') | join(' | ') }}
{%- else -%}{{ schema.type or 'any' }}{%- endif -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>You are ChatGPT.\\nCurrent date: ' + strftime_now('%Y-%m') }}
{{- '\\n\\nReasoning: ' + (reasoning_effort or 'medium') }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{- '\\nCalls go to the channel commentary.' }}{%- endif %}
{{- '<|end|>' }}
{%- if messages[0].role in ['developer', 'system'] %}
    {%- set developer = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set developer = '' %}{%- set turns = messages %}
{%- endif %}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if developer %}{{- '# Instructions\\n\\n' + developer + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}{%- set function = tool.function %}
            {{- '// ' + function.description + '\\ntype ' + function.name + ' = (_: {' }}
            {%- for name, schema in function.parameters.properties.items() %}
                {{- '\\n' + name + ('' if name in (function.parameters.required or []) else '?') }}
                {{- ': ' + type_of(schema) + ',' }}
            {%- endfor %}
            {{- '\\n}) => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in turns %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- if m.content and m.thinking %}
            {{- raise_exception('Cannot pass both content and thinking with calls') }}
        {%- elif m.content or m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (m.content or m.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {%- set ns.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
        {{- '<|message|>' + (call.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.last and not add_generation_prompt and m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- set ns.name = none %}
    {%- elif m.role == 'tool' %}
        {%- if ns.name is none %}{{- raise_exception('a result follows a call') }}{%- endif %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (m.content | tojson) + '<|end|>' }}
    {%- elif m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
# Calls as Python writes them, after the text; content as text or parts.
LLAMA4 = """
{{- bos_token }}
{%- macro text_of(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if messages[0].role == 'system' %}
    {%- set system = text_of(messages[0].content) | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- if system or tools %}
    {{- '<|header_start|>system<|header_end|>\\n\\n' + system }}
    {%- for tool in tools or [] %}{{- '\\n' + (tool.function | tojson(indent=2)) }}{%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' or m.role == 'ipython' %}
        {{- '<|header_start|>ipython<|header_end|>\\n\\n' }}
        {{- m.content | tojson if m.content is not string else m.content }}
    {%- else %}
        {{- '<|header_start|>' + m.role + '<|header_end|>\\n\\n' + text_of(m.content) | trim }}
        {%- if m.tool_calls %}
            {{- '<|python_start|>[' }}
            {%- for call in m.tool_calls %}
                {{- call.function.name + '(' }}
                {%- for name, value in call.function.arguments.items() %}
                    {{- name + '=' + (value | tojson) + (', ' if not loop.last else '') }}
                {%- endfor %}
                {{- ')' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']<|python_end|>' }}
        {%- endif %}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}
"""
# Calls have no name: their ids name the function, and count.
KIMI_K2 = """
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>
{%- endif -%}
{%- if m.role == 'tool' -%}
<|im_system|>{{ m.name or 'tool' }}<|im_middle|>
{{- '## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else -%}
<|im_{{ m.role }}|>{{ m.name or m.role }}<|im_middle|>{{ m.content or '' }}
{%- if m.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
MINIMAX_M1 = """
{{- '<begin_of_document>' }}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{ '<beginning_of_sentence>system ai_setting=assistant\\n' + m.content[0].text }}
{%- elif m.role == 'user' -%}
{{ '<beginning_of_sentence>user name=user\\n' + m.content[0].text }}
{%- elif m.role == 'assistant' -%}
{{ '<beginning_of_sentence>ai name=assistant\\n' }}
{%- for part in m.content | selectattr('type', 'equalto', 'text') -%}
{%- generation -%}{{ part.text }}{%- endgeneration -%}
{%- endfor -%}
{%- else -%}{{ raise_exception('Unknown role') }}{%- endif -%}
{{ '<end_of_sentence>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<beginning_of_sentence>ai name=assistant\\n' }}{%- endif -%}
"""
# Calls as XML; thinking is shown after the last question only.
MINIMAX_M2 = """
{%- set ns = namespace(last=-1, called=false) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
]~!b[]~b]system{{ '\\n' }}
{%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- else -%}Help.{%- endif -%}
{%- if tools -%}{{ '\\n\\n# Tools\\n<tools>\\n' }}
{%- for tool in tools -%}
<tool>{{ tool.function | tojson(ensure_ascii=False) }}</tool>{{ '\\n' }}
{%- endfor -%}</tools>{%- endif -%}
{{ '[e~[\\n' }}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ ']~b]user\\n' + m.content + '[e~[\\n' }}
{%- elif m.role == 'assistant' -%}
{{ ']~b]ai\\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{%- endif -%}
{{ m.content or '' }}
{%- if m.tool_calls -%}
{%- set ns.called = true -%}
{{ '\\n<minimax:tool_call>\\n' }}
{%- for call in m.tool_calls -%}
{{ '<invoke name="' + call.function.name + '">\\n' }}
{%- for name, value in call.function.arguments.items() -%}
{{ '<parameter name="' + name + '">' }}
{{- value if value is string else value | tojson }}{{ '</parameter>\\n' }}
{%- endfor -%}{{ '</invoke>\\n' }}
{%- endfor -%}</minimax:tool_call>
{%- endif -%}
{{ '[e~[\\n' }}
{%- elif m.role == 'tool' -%}
{%- if not ns.called -%}{{ raise_exception('a result follows a call') }}{%- endif -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ ']~b]tool' }}{%- endif -%}
{{ '\\n<response>' + m.content + '</response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '[e~[\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ']~b]ai\\n<think>\\n' }}{%- endif -%}
"""
# Arguments one by one, an empty thought where none is shown, a mark behind questions.
GLM45 = """
{{- '[gMASK]<sop>' }}
{%- if tools -%}{{ '<|system|>\\n# Tools\\n<tools>\\n' }}
{%- for tool in tools -%}{{ tool | tojson(ensure_ascii=False) + '\\n' }}{%- endfor -%}</tools>
{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{ '<|user|>\\n' + m.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking else '' }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- if loop.index0 > ns.last and m.reasoning_content -%}
{{ '\\n<think>' + m.reasoning_content.strip() + '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if m.content.strip() -%}{{ '\\n' + m.content.strip() }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{ '\\n<tool_call>' + call.name + '\\n' }}
{%- for name, value in call.arguments.items() -%}
<arg_key>{{ name }}</arg_key>{{ '\\n' }}<arg_value>
{{- value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>{{ '\\n' }}
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}{{ '<|system|>\\n' + m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '\\n<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif -%}
"""
# A switch that is off by default, arguments as text, no turn of the assistant after results.
DEEPSEEK_V31 = """
{%- set thinking = thinking if thinking is defined else false -%}
{%- set ns = namespace(system='', after=false, first=true) -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}
{%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + m.content -%}
{%- set ns.first = false -%}
{%- endif -%}{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- if tools -%}{{ '\\n\\n## Tools\\n' }}{%- for tool in tools -%}
{{ tool.function.name + ': ' + tool.function.description + '\\n' + (tool.function | tojson) }}
{%- endfor -%}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.after = true -%}{{ '<U>' + m.content }}
{%- elif m.role == 'assistant' -%}
{%- if ns.after -%}{{ '<A></think>' }}{%- endif -%}
{%- set ns.after = false -%}
{%- if m.content is not none -%}{{ m.content.split('</think>', 1)[-1] }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ ('<calls>' if loop.first else '') + '<call>' + call.function.name + '<sep>'
   + call.function.arguments + '</call>' + ('</calls>' if loop.last else '') }}
{%- endfor -%}
{{ eos_token }}
{%- elif m.role == 'tool' -%}{{ '<out>' + m.content + '</out>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.after -%}
{{ '<A>' + ('<think>' if thinking else '</think>') }}{%- endif -%}
"""
HUNYUAN = """
{%- for m in messages -%}
{%- if m.role == 'system' and loop.first -%}{{ bos_token + m.content + '<|extra_4|>' }}
{%- elif m.role == 'user' -%}
{%- if not (loop.index0 == 1 and messages[0].role == 'system') -%}{{ bos_token }}{%- endif -%}
{{ ('/no_think' if enable_thinking is defined and not enable_thinking else '') + m.content
   + '<|extra_0|>' }}
{%- elif m.role == 'assistant' -%}{{ m.content + eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n' }}{%- endif -%}
"""
# A budget in the system turn, tools as Python functions, calls as tags with parameters.
SEED_OSS = """
{%- set budget = thinking_budget if thinking_budget is defined else -1 -%}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- if system or tools -%}
{{ bos_token + 'system\\n' + system }}
{%- for tool in tools or [] -%}
{{ '\\nFunction:\\ndef ' + tool.function.name + '(' + tool.function.parameters.properties.keys()
   | join(', ') + '):\\n    \"\"\"' + tool.function.description + '\"\"\"' }}
{%- endfor -%}
{{ eos_token }}
{%- endif -%}
{%- if budget >= 0 -%}{{ bos_token + 'system\\nBudget: ' + budget | string + eos_token }}
{%- endif -%}
{%- for m in turns -%}
{%- if m.role in ['user', 'system', 'tool'] -%}
{{ bos_token + m.role + '\\n' + m.content + eos_token }}
{%- elif m.role == 'assistant' -%}
{{ bos_token + 'assistant' }}
{%- if m.reasoning_content -%}
{{ '\\n<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}{%- endif -%}
{%- if m.content -%}{{ '\\n' + m.content | trim }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments.items() -%}
{{ '<parameter=' + name + '>' }}{{ value if value is string else value | tojson }}
{{- '</parameter>\\n' }}
{%- endfor -%}{{ '</function>\\n</seed:tool_call>' }}
{%- endfor -%}
{{ eos_token }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ bos_token + 'assistant\\n' + ('<seed:think></seed:think>' if budget == 0 else '') }}
{%- endif -%}
"""
# Tools are shown, calls and results are not.
GRANITE33 = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set system = 'Today is ' + strftime_now('%B %Y') + '. You are Granite.' -%}
{%- set turns = messages -%}
{%- endif -%}
{{ '<|role|>system<|of|>' + system + '<|eot|>\\n' }}
{%- if tools -%}{{ '<|role|>available_tools<|of|>' + tools | tojson(indent=4) + '<|eot|>\\n' }}
{%- endif -%}
{%- for m in turns -%}{{ '<|role|>' + m.role + '<|of|>' + m.content + '<|eot|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|role|>assistant<|of|>{%- endif -%}
"""
# Lists of calls between tags; results in the turn of the user; thoughts are cut off.
NEMOTRON_NANO = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{{ '<SPECIAL_10>System\\n' + system.strip() }}
{%- if tools -%}{{ '\\n\\n<AVAILABLE_TOOLS>[' }}
{%- for tool in tools -%}{{ (', ' if not loop.first else '') + (tool.function | tojson) }}
{%- endfor -%}]</AVAILABLE_TOOLS>{%- endif -%}
{{ '\\n' }}
{%- for m in turns -%}
{%- if m.role == 'user' -%}{{ '<SPECIAL_11>User\\n' + m.content.strip() + '\\n' }}
{%- elif m.role == 'tool' -%}
{%- if messages | length > 1 and turns[loop.index0 - 1].role != 'tool' -%}
{{ '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' }}{%- endif -%}
{{ m.content }}
{{- ', ' if not loop.last and turns[loop.index0 + 1].role == 'tool' else ']</TOOL_RESPONSE>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<SPECIAL_11>Assistant\\n' + m.content.split('</think>')[-1].strip() }}
{%- if m.tool_calls -%}{{ '<TOOLCALL>[' }}
{%- for call in m.tool_calls -%}
{{ '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string
    else call.function.arguments | tojson }}{{ '}' + (', ' if not loop.last else '') }}
{%- endfor -%}]</TOOLCALL>{%- endif -%}
{{ '\\n<SPECIAL_12>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<SPECIAL_11>Assistant\\n' + ('<think></think>' if '/no_think' in system else '<think>\\n') }}
{%- endif -%}
"""
# Ids are numbers by place, text beside calls is shown as a field that clients do not send.
COMMAND_A = """
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = 'Preamble.' -%}{%- set turns = messages -%}{%- endif -%}
{{ '<|START|><|SYSTEM|># System Preamble\\n' + system }}
{%- if tools -%}{{ '\\n## Available Tools\\n```json\\n[' }}
{%- for tool in tools -%}
{{ '\\n    {"name": "' + tool.function.name + '", "description": "' + tool.function.description
   + '", "parameters": ' + (tool.function.parameters | tojson) + '}' }}
{%- endfor -%}{{ '\\n]\\n```' }}{%- endif -%}
{{ '<|END|>' }}
{%- set ns = namespace(count=0) -%}
{%- for m in turns -%}
{%- if m.role == 'user' -%}{{ '<|START|><|USER|>' + m.content + '<|END|>' }}
{%- elif m.role == 'system' -%}{{ '<|START|><|SYSTEM|>' + m.content + '<|END|>' }}
{%- elif m.tool_calls -%}
{{ '<|START|><|BOT|>' }}
{%- if m.tool_plan -%}{{ '<|THINK|>' + m.tool_plan + '<|/THINK|>' }}{%- endif -%}
{{ '<|ACTION|>[' }}
{%- for call in m.tool_calls -%}
{{ '\\n    {"tool_call_id": "' + ns.count | string + '", "tool_name": "' + call.function.name
   + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
{{- ',' if not loop.last else '' }}
{%- set ns.count = ns.count + 1 -%}
{%- endfor -%}{{ '\\n]<|/ACTION|><|END|>' }}
{%- elif m.role == 'assistant' -%}{{ '<|START|><|BOT|><|RESPONSE|>' + m.content + '<|END|>' }}
{%- elif m.role == 'tool' -%}
{{ '<|START|><|SYSTEM|><|RESULT|>[{"results": {"content": ' + (m.content | tojson)
   + '}}]<|/RESULT|><|END|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|START|><|BOT|>' }}{%- endif -%}
"""
# No system turn: it is the head of the first question. Turns alternate; content or parts.
GEMMA3 = """
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
{%- set head = (messages[0].content if messages[0].content is string
                else messages[0].content[0].text) + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}{%- set head = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for m in turns -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n'
   + (head if loop.first else '') }}
{%- if m.content is string -%}{{ m.content | trim }}
{%- elif m.content is iterable -%}{%- for part in m.content -%}{{ part.text | trim }}{%- endfor -%}
{%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
# A switch that shows in the system turn and in answers; flags in the system message.
SMOLLM3 = """
{%- set mode = '/think' if enable_thinking | default(true) else '/no_think' -%}
{%- if messages[0].role == 'system' -%}
{%- set custom = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- if '/no_think' in custom -%}{%- set mode = '/no_think' -%}{%- endif -%}
{%- else -%}{%- set custom = 'Help.' -%}{%- set turns = messages -%}{%- endif -%}
{{ '<|im_start|>system\\n## Metadata\\n\\nToday: ' + strftime_now('%B %Y') + '\\nReasoning Mode: '
   + mode + '\\n\\n## Custom Instructions\\n\\n' + custom.replace('/no_think', '').rstrip()
   + '\\n\\n' }}
{%- if tools -%}{{ '### Tools\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' + (tool.function | string) }}{%- endfor -%}{{ '\\n</tools>' }}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- for m in turns -%}
{%- if m.role == 'user' -%}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n')
   + m.content.lstrip('\\n') }}
{%- for call in m.tool_calls or [] -%}
{{ '\\n<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)
   + '</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' + ('' if mode == '/think' else '<think>\\n\\n</think>\\n') }}
{%- endif -%}
"""
# A developer turn of the template's own; calls and results stay within one turn.
APERTUS = """
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = 'You are Apertus.' -%}{%- set turns = messages -%}{%- endif -%}
{{ '<|system_start|>' + system + '<|system_end|><|developer_start|>Deliberation: ' }}
{{- 'enabled' if enable_thinking is defined and enable_thinking else 'disabled' }}
{%- if tools -%}{%- for tool in tools -%}
{{ '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {' }}
{%- for name in tool.function.parameters.properties -%}{{ name + ': any, ' }}{%- endfor -%}
{{ '}) => any;' }}{%- endfor -%}
{%- else -%}{{ '\\nTool Capabilities: disabled' }}{%- endif -%}
{{ '<|developer_end|>' }}
{%- set ns = namespace(open=false, results=false) -%}
{%- for m in turns -%}
{%- if m.role == 'tool' -%}
{{ (', ' if ns.results else '[') + m.content }}{%- set ns.results = true -%}
{%- else -%}
{%- if ns.results -%}{{ ']' }}{%- set ns.results = false -%}{%- endif -%}
{%- if m.role == 'user' -%}
{%- if ns.open -%}{{ '<|assistant_end|>' }}{%- set ns.open = false -%}{%- endif -%}
{{ '<|user_start|>' + m.content + '<|user_end|>' }}
{%- elif m.role == 'assistant' -%}
{%- if not ns.open -%}{{ '<|assistant_start|>' }}{%- set ns.open = true -%}{%- endif -%}
{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ '<|tools_prefix|>[' }}
{%- for call in m.tool_calls -%}
{{ '{"' + call.function.name + '": ' + call.function.arguments + '}'
   + (', ' if not loop.last else '') }}
{%- endfor -%}{{ ']<|tools_suffix|>' }}
{%- endif -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if ns.results -%}{{ ']' }}{%- endif -%}
{%- if ns.open and (not turns or turns[-1].role == 'assistant') -%}{{ '<|assistant_end|>' }}
{%- endif -%}
{%- if add_generation_prompt and turns[-1].role == 'user' -%}{{ '<|assistant_start|>' }}
{%- endif -%}
"""
# A system turn of its own, name and arguments by tokens, text beside calls.
MISTRAL_V11 = """
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{%- set turns = messages[1:] -%}
{%- else -%}
{{ '[SYSTEM_PROMPT]Today is ' + strftime_now('%Y-%m') + '.[/SYSTEM_PROMPT]' }}
{%- set turns = messages -%}
{%- endif -%}
{%- if tools -%}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif -%}
{%- set ns = namespace(index=0) -%}
{%- for m in turns -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.index % 2 == 0) -%}
{{ raise_exception('turns must alternate') }}{%- endif -%}
{%- set ns.index = ns.index + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'system' -%}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- elif m.role == 'assistant' -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
{%- if call.id | length != 9 -%}{{ raise_exception('length 9!') }}{%- endif -%}
{{ '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]'
   + (call.function.arguments | tojson) }}
{%- endfor -%}
{{ eos_token }}
{%- elif m.role == 'tool' -%}
{{ '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif -%}
{%- endfor -%}
"""
# Parameters of calls as tags.
QWEN3_CODER = """
{%- if messages[0].role == 'system' -%}
{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- if system or tools -%}
{{ '<|im_start|>system\\n' + system }}
{%- if tools -%}{{ '\\n\\n<tools>' }}
{%- for tool in tools -%}{%- set tool = tool.function or tool -%}
{{ '\\n<function>\\n<name>' + tool.name + '</name>\\n<description>' + tool.description | trim
   + '</description>\\n<parameters>' }}
{%- for name, fields in tool.parameters.properties | items -%}
{{ '\\n<parameter>\\n<name>' + name + '</name>\\n<type>' + fields.type + '</type>\\n</parameter>' }}
{%- endfor -%}{{ '\\n</parameters>\\n</function>' }}
{%- endfor -%}{{ '\\n</tools>' }}{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- for m in turns -%}
{%- if m.role == 'assistant' and m.tool_calls is defined and m.tool_calls is iterable -%}
{{ '<|im_start|>assistant' }}
{%- if m.content is defined and m.content is string and m.content | trim | length > 0 -%}
{{ '\\n' + m.content | trim + '\\n' }}{%- endif -%}
{%- for call in m.tool_calls -%}
{{ '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items -%}
{{ '<parameter=' + name + '>\\n' + (value if value is string else value | tojson)
   + '\\n</parameter>\\n' }}
{%- endfor -%}{{ '</function>\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- elif m.role in ['user', 'system', 'assistant'] -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem and loop.previtem.role != 'tool' -%}{{ '<|im_start|>user\\n' }}{%- endif -%}
{{ '<tool_response>\\n' + m.content + '\\n</tool_response>\\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
