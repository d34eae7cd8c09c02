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
    def barrier(self, mark: Signature, deadline: float) -> None:
        self.first(mark, deadline)

    def broadcast(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        target, root = call.outputs[0].view(torch.uint8), root_of(call)
        for start in range(0, max(1, target.numel()), self.stage_bytes):
            part = target[start : start + self.stage_bytes]
            view = self.views(self._next_half(), torch.uint8, part.numel())[root]
            if self.rank == root:
                view.copy_(part)
            self._arrive(mark if start == 0 else None, deadline)
            if self.rank != root:
                part.copy_(view)

    def all_gather(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        self._collect(call.inputs[0], call.outputs, range(self.size), mark, deadline, read=True)

    def gather(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        here = self.rank == root_of(call)
        self._collect(
            call.inputs[0], call.outputs, range(self.size) if here else range(0), mark, deadline, read=not here
        )

    def _collect(
        self,
        source: torch.Tensor,
        targets: Sequence[torch.Tensor],
        ranks: range,
        mark: Signature,
        deadline: float,
        *,
        read: bool,
    ) -> None:
        """Stage this rank's tensor chunk by chunk if others read it, and copy out what this rank receives."""
        given = source.view(torch.uint8)
        taken = [t.view(torch.uint8) for t in targets]
        longest = max([given.numel(), *(t.numel() for t in taken)])
        for start in range(0, max(1, longest), self.stage_bytes):
            half = self._next_half()
            part = given[start : start + self.stage_bytes]
            if read and part.numel():
                self.stages[self.rank][half][: part.numel()].copy_(part)
            self._arrive(mark if start == 0 else None, deadline)
            for r in ranks:
                into = taken[r][start : start + self.stage_bytes]
                if into.numel():
                    into.copy_(part if r == self.rank else self.stages[r][half][: into.numel()])

    def scatter(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        target, root = call.outputs[0].view(torch.uint8), root_of(call)
        sources = [t.view(torch.uint8) for t in call.inputs]
        piece = self.piece(1)
        for start in range(0, max(1, target.numel()), piece):
            stage = self.stages[root][self._next_half()]
            self._lay_pieces(stage, sources, start, piece)
            self._arrive(mark if start == 0 else None, deadline)
            part = target[start : start + piece]
            if self.rank == root:
                part.copy_(sources[root][start : start + piece])
            else:
                part.copy_(stage[self.rank * piece : self.rank * piece + part.numel()])

    def _lay_pieces(self, stage: torch.Tensor, sources: Sequence[torch.Tensor], start: int, piece: int) -> None:
        """Stage a piece for each other rank."""
        for r, given in enumerate(sources):
            part = given[start : start + piece]
            if r != self.rank and part.numel():
                stage[r * piece : r * piece + part.numel()].copy_(part)

    def all_to_all(self, call: CollectiveCall, mark: Signature, deadline: float) -> None:
        """Exchange rows, which may be uneven. If all rows are equally long, the first round has their first pieces."""
        sources = [t.view(torch.uint8) for t in call.inputs]
        targets = [t.view(torch.uint8) for t in call.outputs]
        counts = [t.numel() for t in (*call.inputs, *call.outputs)]
        piece, level = self.piece(1), counts[0] + 1 if len(set(counts)) == 1 else 0
        half = self._next_half()
        if level:
            self._lay_pieces(self.stages[self.rank][half], sources, 0, piece)
        self.first((*mark[:3], level), deadline)
        if level and self._board.payloads() == [level] * self.size:
            self._take_pieces(half, sources, targets, 0, piece)
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
            half = self._next_half()
            self._lay_pieces(self.stages[self.rank][half], sources, at, piece)
            self._board.barrier(deadline)
            self._take_pieces(half, sources, targets, at, piece)

    def _take_pieces(
        self, half: int, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], start: int, piece: int
    ) -> None:
        place = self.rank * piece
        for r, target in enumerate(targets):
            part = target[start : start + piece]
            if r == self.rank:
                part.copy_(sources[r][start : start + piece])
            elif part.numel():
                part.copy_(self.stages[r][half][place : place + part.numel()])

    def check_pairs(self, own: Sequence[int], mark: Signature, deadline: float) -> None:
        """Compare what ranks are about to do, and what each rank sends with what its peer expects.

        Args:
            own: Number of elements that this rank sends to each rank, and then those that it expects.
            mark, deadline: Of this separate round.
        """
        self.first(mark, deadline)
        self._longest_row(own, deadline)

    def _longest_row(self, own: Sequence[int], deadline: float) -> int:
        """Return the largest number of elements that any rank sends to another one, after comparing."""
        views, size = self.views(self._next_half(), torch.int64, len(own)), self.size
        views[self.rank].copy_(torch.tensor(own, dtype=torch.int64, device="cpu"))
        self._board.barrier(deadline)
        rows: list[list[int]] = [view.tolist() for view in views]
        if any(rows[a][b] != rows[b][size + a] for a in range(size) for b in range(size)):
            self._differ()
        return max(max(row) for row in rows)
