"""The syntaxes of calls, a file each; which one a model has is read off its chat template."""

from __future__ import annotations

from paged_kv.serve.chat.syntaxes.base import Asked, Call, Syntax
from paged_kv.serve.chat.syntaxes.deepseek import DeepSeek3, DeepSeek31
from paged_kv.serve.chat.syntaxes.gemma import FunctionGemma, Gemma
from paged_kv.serve.chat.syntaxes.generic import Generic
from paged_kv.serve.chat.syntaxes.granite import Granite
from paged_kv.serve.chat.syntaxes.harmony import Harmony
from paged_kv.serve.chat.syntaxes.hermes import Hermes
from paged_kv.serve.chat.syntaxes.llama import Llama
from paged_kv.serve.chat.syntaxes.mistral import Mistral, MistralList
from paged_kv.serve.chat.syntaxes.phi import Functools, Phi
from paged_kv.serve.chat.syntaxes.qwen_coder import QwenCoder

__all__ = ["SYNTAXES", "Asked", "Call", "Generic", "Syntax"]

SYNTAXES: tuple[type[Syntax], ...] = (
    QwenCoder,
    Hermes,
    Harmony,
    Mistral,
    MistralList,
    DeepSeek31,
    DeepSeek3,
    Granite,
    Phi,
    Functools,
    Gemma,
    FunctionGemma,
    Llama,
)
