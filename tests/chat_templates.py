"""Chat templates in the style of the public families, short, for the tests of `estr.chat`.

Each shows one habit: who trims, whose tool answers share a wrapper, who moves the system message,
who drops old thinking, who ends a turn in another token than the end of text.
"""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m['role'] == 'tool' else m['role'] %}"
    "<|start_header_id|>{{ role }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# The system message stands before the newest question, so it moves when another is asked.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set told = messages[1:] %}{% else %}{% set told = messages %}{% endif %}"
    "{% set ns = namespace(newest=-1) %}"
    "{% for m in told %}{% if m['role'] == 'user' %}{% set ns.newest = loop.index0 %}{% endif %}"
    "{% endfor %}{{ bos_token }}{% for m in told %}"
    "{% if m['role'] == 'user' %}[INST] "
    "{% if system is defined and loop.index0 == ns.newest %}{{ system }}\n\n{% endif %}"
    "{{ m['content'] }}[/INST]"
    "{% elif m['role'] == 'tool' %}[TOOL_RESULTS] {{ m['content'] | tojson }}[/TOOL_RESULTS]"
    "{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)

# Thinking is kept only behind the newest question; a run of tool messages shares one wrapper.
QWEN3 = (
    "{% set ns = namespace(newest=-1) %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.newest = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}"
    "{% set said = m['content'] %}{% set thought = '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.newest and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n"
    "{% elif m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m['content'] }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# No system, no tools, strict alternation; <end_of_turn> is not the end of text.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
