"""Checkpoints of text and images: their text is read as that of the text model alone, and nothing else of them."""

import shutil

import pytest
import transformers
from max.dtype import DType
from safetensors.numpy import load_file, save_file

from paged_kv.checkpoint.source import open_source
from paged_kv.errors import CheckpointError
from support.checkpoints import assert_same, make_checkpoint, rewrite
from support.families import CASES

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
VISION |= {"image_size": 28, "patch_size": 14}
WRAPPERS = {
    "Mistral3": ("ministral3", "pixtral"),
    "Gemma3": ("gemma3", "siglip_vision_model"),
    "Llama4": ("llama4", "llama4_vision_model"),
    "Gemma4": ("gemma4", "gemma4_vision"),
}
"""The text's case and the kind of the images' model of each."""


def saved(folder, wrapper):
    """A checkpoint of text and images, and one of its text alone: their folders, and the text's tensors."""
    case, images = WRAPPERS[wrapper]
    family, switches = CASES[case]
    text = make_checkpoint(folder / "text", family=family, **switches)
    config = getattr(transformers, f"{wrapper}Config")(
        text_config=text.config.to_dict(),
        vision_config={"model_type": images, **VISION},
        tie_word_embeddings=text.config.tie_word_embeddings,
    )
    whole = getattr(transformers, f"{wrapper}ForConditionalGeneration")(config)
    if hasattr(whole, "language_model"):  # Llama 4's, which has a head
        whole.language_model.load_state_dict(text.state_dict())
    else:
        whole.model.language_model.load_state_dict(text.model.state_dict())
        whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(folder / "whole")
    shutil.copy(folder / "text" / "tokenizer.json", folder / "whole")
    return folder / "whole", folder / "text", dict(text.state_dict())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_text_is_that_of_the_text_model(tmp_path, wrapper):
    whole, text, tensors = saved(tmp_path, wrapper)
    source, expected = open_source(whole), open_source(text)
    assert source.config == expected.config
    found, weights = source.load(DType.float32), expected.load(DType.float32)
    assert found.keys() == weights.keys()
    assert_same(found, {name: tensors[name] for name in found if name in tensors})


def test_a_file_of_two_names_for_one_tensor_is_refused(tmp_path):
    whole, _, _ = saved(tmp_path, "Mistral3")
    file = whole / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("norm.weight") and "language_model" in name)
    save_file(tensors | {name.replace("language_model.model.", "model.language_model."): tensors[name]}, file)
    with pytest.raises(CheckpointError, match="is both"):
        open_source(whole)


def test_a_text_model_of_another_family_is_refused(tmp_path):
    whole, _, _ = saved(tmp_path, "Mistral3")
    rewrite(whole / "config.json", text_config={"model_type": "llama"})
    with pytest.raises(
        CheckpointError, match=r'text_config\.model_type: expected "mistral" or "ministral3".*, got "llama"'
    ):
        open_source(whole)


def test_without_a_text_model_it_is_refused(tmp_path):
    whole, _, _ = saved(tmp_path, "Gemma3")
    rewrite(whole / "config.json", text_config=None)
    with pytest.raises(CheckpointError, match="text_config: expected the text model's configuration, got null"):
        open_source(whole)
