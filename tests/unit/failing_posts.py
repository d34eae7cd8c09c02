"""A transport on which a rank fails in the middle of a collective, while all ranks live on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.core.transport import Transport
from unisono.core.types import Message, Work
from unisono.testing import run_ranks
from unisono.wrappers.base import Wrapper

__all__ = ["FailedPostError", "Posts", "run_failing"]


class FailedPostError(Exception):
    """The error of the rank that fails."""


class Posts(dict[int, int]):
    """By rank, how many batches of messages it posts before it fails; a rank without an entry does not fail."""


class _FailingPosts(Wrapper):
    def __init__(self, inner: Transport, posts: Posts) -> None:
        super().__init__(inner)
        self._posts = posts

    def wrap_child(self, inner: Transport) -> _FailingPosts:
        return _FailingPosts(inner, self._posts)

    def post(self, batch: Sequence[Message]) -> Work:
        rank = self.group.members[self.group.rank]
        if rank in self._posts:
            if self._posts[rank] == 0:
                del self._posts[rank]
                raise FailedPostError
            self._posts[rank] -= 1
        return super().post(batch)


def run_failing(program: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Return each rank's `program(comm, posts, *args)`, on threads that share `posts`."""
    posts = Posts()
    return run_ranks(lambda comm: program(comm, posts, *args), size, wrap=lambda inner: _FailingPosts(inner, posts))
