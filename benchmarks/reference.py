"""A GPT as one would write it without this project: what `benchmarks.training` compares with.

One product for q, k and v, SDPA, cross entropy over whole logits, one set of weights in fp32, the
head tied to the embedding.  `qkv` holds head after head, so that a cut of its outputs is a cut in
heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanogeex.config import ModelConfig


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.head_size = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:                             # (B, T, H) -> (B, T, H)
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (-1, 3 * self.head_size)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, -1), is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.words = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.positions = nn.Parameter(0.02 * torch.randn(config.seq_length, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        nn.init.normal_(self.words.weight, 0, 0.02)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:          # (B, T) each -> ()
        x = self.words(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.ln(x)).float(), targets)

    @staticmethod
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
