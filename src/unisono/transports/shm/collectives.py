"""Collectives in shared memory, as rounds: reductions, and data movement between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.core.types import CollectiveCall
from unisono.transports.shm.reductions import Reductions, root_of
from unisono.transports.shm.signature import Signature

__all__ = ["ShmCollectives"]


class ShmCollectives(Reductions):
    """The collectives of one group."""

    # -- movements, as bytes -------------------------------------------------------------------
    def barrier(self, signature: Signature, deadline: float) -> None:
        self.first(signature, deadline)

    def broadcast(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        target, root = call.outputs[0].view(torch.uint8), root_of(call)
        for start in range(0, max(1, target.numel()), self.stage_bytes):
            part = target[start : start + self.stage_bytes]
            view = self.views(self._next_stage(), torch.uint8, part.numel())[root]
            if self.rank == root:
                view.copy_(part)
            self._arrive(signature if start == 0 else None, deadline)
            if self.rank != root:
                part.copy_(view)

    def all_gather(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        self._gather_chunks(call.inputs[0], call.outputs, range(self.size), signature, deadline, read=True)

    def gather(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        is_root = self.rank == root_of(call)
        self._gather_chunks(
            call.inputs[0],
            call.outputs,
            range(self.size) if is_root else range(0),
            signature,
            deadline,
            read=not is_root,
        )

    def _gather_chunks(
        self,
        source: torch.Tensor,
        targets: Sequence[torch.Tensor],
        ranks: range,
        signature: Signature,
        deadline: float,
        *,
        read: bool,
    ) -> None:
        """Stage this rank's tensor chunk by chunk if others read it, and copy out what this rank receives."""
        content = source.view(torch.uint8)
        results = [t.view(torch.uint8) for t in targets]
        longest = max([content.numel(), *(t.numel() for t in results)])
        for start in range(0, max(1, longest), self.stage_bytes):
            index = self._next_stage()
            part = content[start : start + self.stage_bytes]
            if read and part.numel():
                self.stages[self.rank][index][: part.numel()].copy_(part)
            self._arrive(signature if start == 0 else None, deadline)
            for r in ranks:
                into = results[r][start : start + self.stage_bytes]
                if into.numel():
                    into.copy_(part if r == self.rank else self.stages[r][index][: into.numel()])

    def scatter(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        target, root = call.outputs[0].view(torch.uint8), root_of(call)
        sources = [t.view(torch.uint8) for t in call.inputs]
        piece = self.piece(1)
        for start in range(0, max(1, target.numel()), piece):
            stage = self.stages[root][self._next_stage()]
            self._stage_pieces(stage, sources, start, piece)
            self._arrive(signature if start == 0 else None, deadline)
            part = target[start : start + piece]
            if self.rank == root:
                part.copy_(sources[root][start : start + piece])
            else:
                part.copy_(stage[self.rank * piece : self.rank * piece + part.numel()])

    def _stage_pieces(self, stage: torch.Tensor, sources: Sequence[torch.Tensor], start: int, piece: int) -> None:
        """Stage a piece for each other rank."""
        for r, content in enumerate(sources):
            part = content[start : start + piece]
            if r != self.rank and part.numel():
                stage[r * piece : r * piece + part.numel()].copy_(part)

    def all_to_all(self, call: CollectiveCall, signature: Signature, deadline: float) -> None:
        """Exchange rows, which may be uneven. If all rows are equally long, the first round has their first pieces."""
        sources = [t.view(torch.uint8) for t in call.inputs]
        targets = [t.view(torch.uint8) for t in call.outputs]
        counts = [t.numel() for t in (*call.inputs, *call.outputs)]
        piece, payload = self.piece(1), counts[0] + 1 if len(set(counts)) == 1 else 0
        index = self._next_stage()
        if payload:
            self._stage_pieces(self.stages[self.rank][index], sources, 0, piece)
        self.first((*signature[:3], payload), deadline)
        if payload and self._barrier.payloads() == [payload] * self.size:
            self._copy_out_pieces(index, sources, targets, 0, piece)
            self._exchange(sources, targets, piece, counts[0] * call.inputs[0].element_size(), deadline)
        else:
            self.ragged_all_to_all(call, deadline)

    def ragged_all_to_all(self, call: CollectiveCall, deadline: float) -> None:
        """Run the rest of an all_to_all, if not all ranks have declared rows of one equal length."""
        counts = [t.numel() for t in (*call.inputs, *call.outputs)]
        longest = self._longest_row(counts, deadline) * call.inputs[0].element_size()
        sources, targets = ([t.view(torch.uint8) for t in side] for side in (call.inputs, call.outputs))
        self._exchange(sources, targets, 0, longest, deadline)

    def _exchange(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        start: int,
        longest: int,
        deadline: float,
    ) -> None:
        """Exchange the pieces of all pairs of ranks, from byte `start` on."""
        piece = self.piece(1)
        for at in range(start, longest, piece):
            index = self._next_stage()
            self._stage_pieces(self.stages[self.rank][index], sources, at, piece)
            self._barrier.arrive_and_wait(deadline)
            self._copy_out_pieces(index, sources, targets, at, piece)

    def _copy_out_pieces(
        self, index: int, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], start: int, piece: int
    ) -> None:
        low = self.rank * piece
        for r, target in enumerate(targets):
            part = target[start : start + piece]
            if r == self.rank:
                part.copy_(sources[r][start : start + piece])
            elif part.numel():
                part.copy_(self.stages[r][index][low : low + part.numel()])

    def check_pairs(self, own: Sequence[int], signature: Signature, deadline: float) -> None:
        """Compare what ranks are about to do, and what each rank sends with what its peer expects.

        Args:
            own: Number of elements that this rank sends to each rank, and then those that it expects.
            signature, deadline: Signature and deadline of this separate round.
        """
        self.first(signature, deadline)
        self._longest_row(own, deadline)

    def _longest_row(self, own: Sequence[int], deadline: float) -> int:
        """Return the largest number of elements that any rank sends to another one, after comparing."""
        views, size = self.views(self._next_stage(), torch.int64, len(own)), self.size
        views[self.rank].copy_(torch.tensor(own, dtype=torch.int64, device="cpu"))
        self._barrier.arrive_and_wait(deadline)
        rows: list[list[int]] = [view.tolist() for view in views]
        if any(rows[a][b] != rows[b][size + a] for a in range(size) for b in range(size)):
            self._raise_mismatch()
        return max(max(row) for row in rows)
