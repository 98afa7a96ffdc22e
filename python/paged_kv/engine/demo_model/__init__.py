"""A Llama of 2 million parameters, trained on the King James Bible by `examples/train_demo_model.py`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

FOLDER = Path(str(files(__name__)))
"""Its checkpoint, in Hugging Face format, bfloat16."""
