"""Pipeline parallelism: each rank holds some of the layers, and a batch passes in small parts, the microbatches.

Sources: PipeDream-Flush, or 1F1B, in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021; its
interleaved form in Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
2021.

With p ranks, m microbatches and v chunks of layers on each rank, ranks are idle for (p - 1) / (v m) of the time that
they compute. With v = 1, rank r keeps the activations of at most p - r microbatches.
"""

from dataclasses import dataclass

import torch

ACTIVATION, GRADIENT = 0, 1  # tags


@dataclass(frozen=True)
class Action:
    """One step of a schedule: forward or backward of a microbatch through one of the rank's chunks."""

    forward: bool
    chunk: int
    microbatch: int


def schedule(rank, size, microbatches, chunks=1):
    """Return the actions of a rank in their order: 1F1B, interleaved if there are several chunks.

    A rank runs some forward passes ahead, then one forward and one backward pass in turn, then the rest of the backward
    passes. Chunk c of rank r holds stage c * size + r of the model. A rank runs as many microbatches as there are ranks
    through a chunk before it proceeds to the next chunk.
    """
    if microbatches < 1:
        raise ValueError(f"a step takes at least one microbatch, not {microbatches}")
    if chunks > 1 and microbatches % size:
        raise ValueError(f"interleaving takes a multiple of {size} ranks as microbatches, not {microbatches}")
    total = microbatches * chunks
    ahead = size - 1 - rank if chunks == 1 else 2 * (size - 1 - rank) + (chunks - 1) * size
    ahead = min(ahead, total)
    forward, backward = [], []
    for i in range(total):
        if chunks == 1:
            chunk, microbatch = 0, i
        else:
            turn, place = divmod(i, size * chunks)
            chunk, microbatch = place // size, turn * size + place % size
        forward.append(Action(True, chunk, microbatch))
        backward.append(Action(False, chunks - 1 - chunk, microbatch))
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(action for pair in pairs for action in pair), *backward[total - ahead :]]


class Pipeline:
    """A model whose stages are divided between the ranks of a communicator.

    Between two actions a rank sends the result of one and receives what the next needs, together, and has started to
    receive for the action after it: so ranks never wait for each other in a circle, even if no message is buffered.
    Activations and gradients have a tag each, within which a rank sends in the order in which its neighbor receives.
    The backend needs tags, which all have but nccl.

    Args:
        chunks: This rank's modules: chunk c is stage `c * comm.size + comm.rank` of the model. As many on each rank.
        comm: The ranks, in the order of stages.
        activation: A tensor of the shape, dtype and device of what stages pass on for one microbatch.
    """

    def __init__(self, chunks, comm, activation):
        if comm.size == 1 and len(chunks) > 1:
            raise ValueError(f"one rank runs its layers as one chunk, not as {len(chunks)}")
        self.chunks, self.comm, self.activation = chunks, comm, activation
        self.previous, self.next = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        self.peak = 0  # the largest number of microbatches, of all chunks, whose activations were kept

    def step(self, inputs, loss):
        """Add the gradients of the mean loss of all microbatches to the parameters; return that loss on every rank.

        Args:
            inputs: The microbatches. Other ranks than the first only count them.
            loss: A function of the last stage's output and the number of the microbatch; used on the last rank.
        """
        rank, size = self.comm.rank, self.comm.size
        stages, mean = len(self.chunks) * size, self.activation.new_zeros((), dtype=torch.float64)
        actions = schedule(rank, size, len(inputs), len(self.chunks))
        kept, sent, arriving = {}, None, self._receive(actions[0])
        for action, following in zip(actions, [*actions[1:], None], strict=True):
            stage, key = action.chunk * size + rank, (action.chunk, action.microbatch)
            received, work = arriving
            arriving = self._receive(following)
            _wait(work, sent)
            sent = None
            if action.forward:
                x = inputs[action.microbatch] if received is None else received.requires_grad_()
                y = self.chunks[action.chunk](x)
                if stage == stages - 1:
                    y = loss(y, action.microbatch) / len(inputs)
                    mean += y.detach()
                elif y.shape != self.activation.shape:
                    raise ValueError(f"stage {stage} returned {tuple(y.shape)}, not {tuple(self.activation.shape)}")
                else:
                    sent = self.comm.isend(y.detach(), self.next, ACTIVATION)
                kept[key] = x, y
                self.peak = max(self.peak, len(kept))
            else:
                x, y = kept.pop(key)
                y.backward(received)  # of a loss, the last stage's, it is None
                if stage > 0:
                    sent = self.comm.isend(x.grad, self.previous, GRADIENT)
        _wait(sent)
        self.comm.broadcast(mean, size - 1)
        return mean

    def _receive(self, action):
        """Start to receive what an action needs from another rank: return the tensor and the work, None if nothing."""
        if action is None:
            return None, None
        stage = action.chunk * self.comm.size + self.comm.rank
        if stage == (0 if action.forward else len(self.chunks) * self.comm.size - 1):
            return None, None
        tensor = torch.empty_like(self.activation)
        peer, tag = (self.previous, ACTIVATION) if action.forward else (self.next, GRADIENT)
        return tensor, self.comm.irecv(tensor, peer, tag)


def _wait(*works):
    for work in works:
        if work is not None:
            work.wait()
