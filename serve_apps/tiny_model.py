"""The demo's model: a Llama of a million random parameters and its tokenizer, made on this machine on first use.

Answers mean nothing; what counts is that the real engine does its real work without a download or a GPU. It may not use
the network or import Ray or vLLM. The same version of this module makes the same files on every machine with the same
Python and torch, and several replicas may make them at once: each builds aside and renames, the first one wins.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

TINY_MODEL = "quartermaster/tiny-llama"
VERSION = 1
HIDDEN, LAYERS, HEADS, INTERMEDIATE = 128, 2, 4, 256
MAX_POSITIONS = 2048
VOCABULARY = 2048
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def cache_folder() -> Path:
    """``$QM_CACHE``, else ``quartermaster`` in the user's cache folder."""
    named = os.environ.get("QM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quartermaster"


def ensure(cache: Path | None = None) -> Path:
    """The folder that holds the model, made when it is not there. Raises OSError when the cache cannot be written."""
    cache = cache_folder() if cache is None else cache
    folder = cache / f"tiny-llama-{VERSION}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="tiny-llama-", dir=cache))
        try:
            build(aside)
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # another replica may have been first
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def build(folder: Path) -> None:
    """Write tokenizer, configuration and weights into an existing empty folder."""
    size = _write_tokenizer(folder)
    _write_json(folder / "config.json", _config(size))
    _write_json(folder / "generation_config.json", {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0})
    _write_weights(folder, size)


def _config(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(folder: Path) -> int:
    """A byte-level BPE trained on Python's own reference text; the size of its vocabulary."""
    from pydoc_data import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([topics.topics[name] for name in sorted(topics.topics)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return int(tokenizer.get_vocab_size())


def _write_weights(folder: Path, vocabulary: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(VERSION)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)
        for name, shape in _shapes(vocabulary).items()
    }
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        shapes |= {f"{layer}.{part}_layernorm.weight": (HIDDEN,) for part in ("input", "post_attention")}
    return shapes


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
