"""Idle time of the ranks of a pipeline, on a virtual clock: no model, no waiting.

python docs/examples/parallel/pipeline_bubble.py

Each stage sleeps instead of computing, and in a simulation sleep takes no real time. A microbatch takes a rank seconds,
and a message 20 us, so that the bubble is that of the schedule alone.
"""

import time

import torch
from pipeline import Pipeline
from torch import nn

import unisono as un


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Busy(nn.Module):
    def __init__(self, *seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        return _Busy.apply(x, *self.seconds)


def program(comm, microbatches, chunks, forward_s, backward_s):
    """Return this rank's seconds for one step, and the most activations that it kept."""
    stages = [Busy(forward_s / chunks, backward_s / chunks) for _ in range(chunks)]
    pipeline = Pipeline(stages, comm, torch.empty(4))
    inputs = torch.zeros(microbatches, 4, requires_grad=True).unbind()
    comm.barrier()
    began = time.monotonic()
    pipeline.step(inputs, lambda y, _: y.sum())
    return time.monotonic() - began, pipeline.peak


def bubble(ranks, microbatches, chunks, forward_s=1.0, backward_s=2.0):
    """Return the idle time as a fraction of the computing time, and the most activations that each rank kept.

    Args:
        ranks, microbatches, chunks: As for `schedule`.
        forward_s, backward_s: Seconds of one microbatch on one rank, in all of its chunks.
    """
    run = un.simulate(program, ranks, args=(microbatches, chunks, forward_s, backward_s))
    seconds, peaks = zip(*run.results, strict=True)
    return max(seconds) / (microbatches * (forward_s + backward_s)) - 1, peaks


if __name__ == "__main__":
    print("ranks  microbatches  chunks  formula  simulated  activations kept by each rank")
    for ranks in (2, 4, 8):
        for microbatches in (4, 8, 16, 32):
            for chunks in (1, 2, 4):
                if chunks == 1 or microbatches % ranks == 0:
                    formula = (ranks - 1) / (chunks * microbatches)
                    found, peaks = bubble(ranks, microbatches, chunks)
                    kept = " ".join(map(str, peaks))
                    print(f"{ranks:5}{microbatches:14}{chunks:8}{formula:9.4f}{found:11.4f}  {kept}")
