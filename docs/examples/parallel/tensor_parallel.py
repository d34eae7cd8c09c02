"""Tensor parallelism: each layer is divided between the ranks, which compute the same batch together.

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019.

A tensor is either divided, so that each rank holds a part of it, or replicated, so that all ranks hold the same. Two
functions convert between both, and each is the other's adjoint: `copy_to_ranks` and `sum_over_ranks`. All ranks compute
the same loss and call `backward()` on it; gradients of replicated tensors and parameters are then the same on all
ranks, and equal to those of one process.
"""

import torch
from torch import nn
from torch.nn import functional

import unisono as un


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, ctx.comm), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return un.autograd.all_reduce(x, comm)

    @staticmethod
    def backward(ctx, grad):
        return _Copy.apply(grad, ctx.comm), None


def copy_to_ranks(x, comm):
    """Return a replicated tensor as it is, for use by divided layers; backward sums the ranks' gradients."""
    return _Copy.apply(x, comm)


def sum_over_ranks(x, comm):
    """Return the sum of the ranks' tensors, which is replicated; backward passes the gradient on as it is."""
    return _Sum.apply(x, comm)


def shard(tensor, dim, comm):
    """Return a copy of this rank's part of a tensor: one of `comm.size` equal parts along a dimension."""
    if tensor.shape[dim] % comm.size:
        raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} cannot be divided evenly by {comm.size} ranks")
    return tensor.detach().chunk(comm.size, dim)[comm.rank].clone()


class ColumnParallelLinear(nn.Module):
    """Some of the outputs of a linear layer: the input is replicated, the output divided along its last dimension.

    Args:
        linear: The whole layer, with the same values on all ranks.
        comm: The ranks that divide it.
    """

    def __init__(self, linear, comm):
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(shard(linear.weight, 0, comm))
        self.bias = None if linear.bias is None else nn.Parameter(shard(linear.bias, 0, comm))

    def forward(self, x):
        return functional.linear(copy_to_ranks(x, self.comm), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """All outputs of a linear layer from some of its inputs: the input is divided, the output replicated.

    Args:
        linear: The whole layer, with the same values on all ranks. Its bias is replicated.
        comm: The ranks that divide it.
    """

    def __init__(self, linear, comm):
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(shard(linear.weight, 1, comm))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        y = sum_over_ranks(functional.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """An embedding, each rank of which holds consecutive rows of the table: codes and the output are replicated.

    Args:
        embedding: The whole embedding, with the same values on all ranks.
        comm: The ranks that divide it.
    """

    def __init__(self, embedding, comm):
        super().__init__()
        self.comm, self.rows = comm, embedding.num_embeddings
        self.weight = nn.Parameter(shard(embedding.weight, 0, comm))

    def forward(self, codes):
        local, here = _local(codes, self.weight.shape[0], self.comm)
        rows = functional.embedding(local, self.weight) * here.unsqueeze(-1)
        return sum_over_ranks(rows, self.comm)


def vocab_parallel_cross_entropy(logits, targets, comm):
    """Return the mean cross entropy of logits that are divided along their last dimension; no rank gathers them.

    Args:
        logits: This rank's part, of shape (..., vocabulary / comm.size), such as a `ColumnParallelLinear` returns.
        targets: Codes of the whole vocabulary, replicated, of shape (...).
        comm: The ranks that divide the vocabulary.
    """
    local, here = _local(targets, logits.shape[-1], comm)
    largest = logits.detach().amax(-1, keepdim=True)
    comm.all_reduce(largest, "max")  # a constant that cancels out: it needs no gradient
    logits = logits - largest
    of_target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * here
    # Both sums are made by one all_reduce.
    total, of_target = sum_over_ranks(torch.stack([logits.exp().sum(-1), of_target]), comm)
    return (total.log() - of_target).mean()


def _local(codes, rows, comm):
    """Return each code's row on this rank, which is 0 where another rank has it, and whether this rank has it."""
    if codes.numel() and not (codes.min() >= 0 and codes.max() < rows * comm.size):
        raise IndexError(f"codes must be 0 to {rows * comm.size - 1}, not {codes.min()} to {codes.max()}")
    local = codes - comm.rank * rows
    here = (local >= 0) & (local < rows)
    return local.where(here, 0), here


def divide_block(block, comm):
    """Divide a block of `transformer.py` in place, by attention heads and hidden units: two all_reduces each way."""
    if block.attention.heads % comm.size:
        raise ValueError(f"{block.attention.heads} attention heads cannot be divided evenly by {comm.size} ranks")
    block.attention.qkv = ColumnParallelLinear(block.attention.qkv, comm)
    block.attention.out = RowParallelLinear(block.attention.out, comm)
    block.up = ColumnParallelLinear(block.up, comm)
    block.down = RowParallelLinear(block.down, comm)
    return block
