# SPDX-License-Identifier: Apache-2.0
"""The small Qwen3.5 model of the examples: its files, configuration, text and byte-level vocabulary."""

import bz2
from pathlib import Path

import torch

EXAMPLES = Path(__file__).resolve().parent
MODEL_DIR = EXAMPLES / "tiny_qwen3_5"
TEXT_FILE = EXAMPLES / "data" / "austen.txt.bz2"
HELD_OUT = 0.05  # the last part of the text, never trained on


def tiny_config():
    """A dense Qwen3.5 text model of 1.95 million parameters (3.9 MB in bfloat16).

    Three gated delta net layers and one full attention layer, as in the large models; grouped value heads
    (2 key heads, 4 value heads of 64 x 64), convolution of width 4, tied embeddings, one token per byte.
    """
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=480,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def encode(text):
    """Text to token ids, int64 [1, T]: one id per UTF-8 byte."""
    return torch.tensor([list(text.encode("utf-8"))], dtype=torch.long)


def decode(ids):
    """Token ids (any 1-D sequence of 0..255) to text; bytes that are no UTF-8 become the replacement character."""
    return bytes(int(i) for i in ids).decode("utf-8", errors="replace")


def load_text(path=TEXT_FILE):
    """Reads a text file (plain or .bz2) and returns two uint8 tensors: (training, held out)."""
    path = Path(path)
    raw = path.read_bytes()
    if path.suffix == ".bz2":
        raw = bz2.decompress(raw)
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    split = int(len(data) * (1 - HELD_OUT))
    return data[:split], data[split:]
