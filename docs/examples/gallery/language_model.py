"""A character-level language model: a small transformer learns to write like Python's own manual.

unisono run -n 2 docs/examples/gallery/language_model.py

Each rank draws other pieces of the text; gradients are averaged while `backward()` runs. Without a launcher the program
trains on one rank, with batches of the same size.
"""

import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional

import unisono as un

CONTEXT, WIDTH, BATCH = 48, 64, 32
TEXT = " ".join("\n".join(topics[name] for name in ("compound", "assignment", "calls", "function", "class")).split())
LETTERS = sorted(set(TEXT))
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.letter, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, codes):
        length = codes.shape[1]
        hidden = self.letter(codes) + self.place.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(hidden, mask, is_causal=True))


def train(comm, steps=200):
    """Return the mean loss of all ranks at each step, in bits per character, and a text of the trained model."""
    torch.manual_seed(0)
    model = LanguageModel()
    averager = un.GradientAverager(model, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(comm.rank)
    losses = []
    for step in range(steps):
        starts = torch.randint(len(CODES) - CONTEXT, (BATCH // comm.size, 1), generator=generator)
        pieces = CODES[starts + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(model(pieces[:, :-1]).transpose(1, 2), pieces[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / math.log(2)
        comm.all_reduce(mean, "avg")
        losses.append(mean.item())
        if comm.rank == 0 and step % 40 == 39:
            print(f"step {step + 1}: {sum(losses[-20:]) / 20:.2f} bits per character", flush=True)
    averager.remove()
    return losses, write(model, "The ")


@torch.no_grad()
def write(model, text, length=100):
    generator = torch.Generator().manual_seed(0)
    for _ in range(length):
        codes = torch.tensor([[LETTERS.index(letter) for letter in text[-CONTEXT:]]])
        chances = (model(codes)[0, -1] / 0.7).softmax(0)
        text += LETTERS[int(torch.multinomial(chances, 1, generator=generator))]
    return text


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with un.init() as comm:
        _, text = train(comm)
        if comm.rank == 0:
            print(text)
