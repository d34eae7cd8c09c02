"""A transformer of characters on four ranks: two stages of a pipeline, each divided between two ranks.

unisono run -n 4 docs/examples/parallel/train_tensor_pipeline.py

On one rank it trains the whole model, and prints the same losses.
"""

from pydoc_data.topics import topics

import torch
from pipeline import Pipeline
from tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding, divide_block, vocab_parallel_cross_entropy
from torch import nn
from transformer import transformer

import unisono as un

CONTEXT, WIDTH, HEADS, DEPTH, BATCH, MICROBATCHES = 32, 64, 4, 2, 32, 4
TEXT = " ".join("\n".join(topics[name] for name in ("compound", "assignment", "calls", "function", "class")).split())
LETTERS = sorted(set(TEXT))
VOCABULARY = len(LETTERS) + len(LETTERS) % 2  # even, so that two ranks can divide it
CODES = torch.tensor([LETTERS.index(letter) for letter in TEXT])


def divide(model, tensor, pipe):
    """Return this rank's stage of a whole model: some of its layers, and a part of each."""
    model[0].letter = VocabParallelEmbedding(model[0].letter, tensor)
    model[-1].logits = ColumnParallelLinear(model[-1].logits, tensor)
    for block in model[1:-1]:
        divide_block(block, tensor)
    first, last = (DEPTH * stage // pipe.size for stage in (pipe.rank, pipe.rank + 1))
    layers = list(model[1:-1][first:last])
    if pipe.rank == 0:
        layers.insert(0, model[0])
    if pipe.rank == pipe.size - 1:
        layers.append(model[-1])
    return nn.Sequential(*layers)


def batches(steps):
    """Yield the same inputs and targets on every rank."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(CODES) - CONTEXT, (BATCH, 1), generator=generator)
        pieces = CODES[starts + torch.arange(CONTEXT + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def whole_model():
    """Return the whole model, the same on every rank."""
    torch.manual_seed(0)
    return transformer(VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH).double()


def train(comm, model, steps=30):
    """Return the loss of each step, on every rank, and this rank's stage."""
    ways = 2 if comm.size == 4 else 1
    if comm.size != ways**2:
        raise ValueError(f"this program runs on 1 or 4 ranks, not {comm.size}")
    # Ranks 0 and 1 divide the layers of the first stage, ranks 2 and 3 those of the second one.
    tensor, pipe = comm.split(comm.rank // ways), comm.split(comm.rank % ways)
    stage = divide(model, tensor, pipe)
    activation = torch.empty(BATCH // MICROBATCHES, CONTEXT, WIDTH, dtype=torch.float64)
    pipeline = Pipeline([stage], pipe, activation)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in batches(steps):
        parts = targets.chunk(MICROBATCHES)
        optimizer.zero_grad()
        loss = pipeline.step(
            inputs.chunk(MICROBATCHES),
            lambda logits, i, parts=parts: vocab_parallel_cross_entropy(logits, parts[i], tensor),
        )
        optimizer.step()
        losses.append(loss.item())
        if comm.rank == 0 and len(losses) % 10 == 0:
            print(f"step {len(losses)}: loss {loss.item():.10f}", flush=True)
    return losses, stage


if __name__ == "__main__":
    torch.set_num_threads(1)  # so small a model gains nothing from more
    with un.init() as comm:
        _, stage = train(comm, whole_model())
        count = sum(parameter.numel() for parameter in stage.parameters())
        print(f"{count} parameters on this rank", flush=True)
