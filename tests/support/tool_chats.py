"""A template with tools as Hermes models have them, two tools, and an engine that says a given text."""

import numpy as np

from paged_kv.checkpoint.config import load_config
from paged_kv.engine import load
from paged_kv.engine.demo_model import FOLDER
from paged_kv.engine.engine import Engine
from paged_kv.engine.tokenizer import Tokenizer
from support.fake_model import Nonsense

HERMES = """{%- if tools %}Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them by <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
THINKING = HERMES + "{# <think> </think> #}"
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
SCHEMAS = {"weather": WEATHER, "time": TIME}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ur", "days": 2}}\n</tool_call>'


def scripted(text):
    """An engine that says a text, whatever it is asked."""
    engine = load(FOLDER, num_pages=256, page_size=16, dtype="float32")
    script = iter([*engine._tokenizer.encode(text, is_template=True), *engine.model.config.eos_token_ids])

    def step(tokens, *_):
        logits = np.zeros((len(tokens), engine.model.config.vocab_size), np.float32)
        logits[:, next(script)] = 9
        return logits

    engine.model.step = step
    return engine


def scripted_without_compiler(*texts):
    """An engine that says some texts, one after the other, whatever it is asked; it needs no compiler."""
    model = Nonsense(256)
    tokenizer = Tokenizer(FOLDER, load_config(FOLDER))
    end = model.config.eos_token_ids[0]
    script = iter([token for text in texts for token in (*tokenizer.encode(text, is_template=True), end)])

    def step(tokens, *_):
        logits = np.zeros((len(tokens), model.config.vocab_size), np.float32)
        logits[:, next(script)] = 99
        return logits

    model.step = step
    return Engine(model, tokenizer, max_step_tokens=4096)
