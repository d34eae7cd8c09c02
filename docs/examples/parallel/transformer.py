"""A plain transformer of characters: the model of the other examples in this folder. It knows nothing of ranks."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        # Its outputs are ordered by head, then query, key and value: so a range of heads is a range of rows.
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        # -1: as many heads as the layer has outputs for.
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2).unbind(-2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, letters, context, width):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, codes):
        return self.letter(codes) + self.place[: codes.shape[1]]


class Head(nn.Module):
    def __init__(self, width, letters):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, x):
        return self.logits(self.norm(x))


def transformer(letters, context, width, heads, depth):
    """Return an embedding, `depth` blocks and a head, in a sequence."""
    blocks = [Block(width, heads) for _ in range(depth)]
    return nn.Sequential(Embedding(letters, context, width), *blocks, Head(width, letters))
