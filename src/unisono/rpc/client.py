"""Client side of an agent: sends requests, and waits for the replies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from unisono.core import clock
from unisono.core.types import Timeout
from unisono.core.work import positive_timeout
from unisono.errors import ClosedError, CommError
from unisono.rpc import protocol
from unisono.rpc.call_future import CallFuture
from unisono.rpc.channel import SEND_S, MessageChannel, rollback
from unisono.rpc.context import Peers, context, current_agent, request
from unisono.rpc.dispatcher import Dispatcher
from unisono.rpc.exported import name_of
from unisono.rpc.pending_call import PendingCall
from unisono.rpc.pending_calls import PendingCalls
from unisono.rpc.protocol import CALL, WorkerInfo
from unisono.rpc.refcount import Key
from unisono.rpc.replies import Replies
from unisono.rpc.rref import RRef, RRefContext
from unisono.rpc.workers import Workers, run_task

__all__ = ["Client", "remote", "rpc_async", "rpc_sync"]

_Args = Sequence[Any]
_Kwargs = Mapping[str, Any] | None


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: _Args = (),
    kwargs: _Kwargs = None,
    timeout: Timeout | None = None,
) -> Any:
    """Call a function on another rank, and return its result.

    Args:
        to: A rank's name or number, or its `WorkerInfo`; may be this rank.
        func: Function that the called rank has exposed with `expose`; only the function's name is sent.
        args: Plain values, containers, dataclasses, tensors, `RRef`s or exposed functions.
        kwargs: Keyword arguments, with the same types as in `args`.
        timeout: Seconds or a `timedelta`; the agent's timeout if None.

    Returns: The function's result, in which tensors are copies, and functions and `RRef`s are references.

    Raises:
        Exception: The function's error, of the same class if this process knows that class, with the remote traceback
            in its text. The error is also an instance of `RemoteError`.
        NotExposedError: The called rank does not expose the function, so nothing ran; or the result contains a function
            that this rank does not expose.
        CommTimeoutError: No answer arrived in time; the function may still be running.
        PeerLostError: The called rank died, or shut down its agent.
        TypeError: An argument cannot be sent; the message says which.
        ValueError: `to` does not identify a rank, or the timeout is not positive.

    Cost: on shared memory about 30 us and two copies of each tensor's bytes.
    """
    client = current_agent().client
    return client.call(*client.target(to, func, args), kwargs, timeout)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: _Args = (),
    kwargs: _Kwargs = None,
    timeout: Timeout | None = None,
) -> CallFuture:
    """Call a function as `rpc_sync` does, but immediately return a `torch.futures.Future` that also has `cancel()`.

    On return, the arguments have been sent and may be modified. `rpc_async` blocks while too many calls to the same
    rank are pending (16384, or 256 MiB).

    Args:
        to, func, args, kwargs, timeout: As for `rpc_sync`.

    Returns: The future of the result.

    Example:
        >>> def program(comm):
        ...     un.rpc.init(comm, expose=[torch.add])
        ...     future = un.rpc.rpc_async(1 - comm.rank, torch.add, (torch.ones(1), comm.rank))
        ...     answer = future.wait().item()
        ...     un.rpc.shutdown()
        ...     return answer
        >>> un.launch(program, 2, "thread")
        [1.0, 2.0]
    """
    client = current_agent().client
    future: CallFuture = client.start(*client.target(to, func, args), kwargs, timeout)
    return future


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: _Args = (),
    kwargs: _Kwargs = None,
    timeout: Timeout | None = None,
) -> RRef[Any]:
    """Call a function as `rpc_async` does, but keep the result on the callee, and immediately return an `RRef` to it.

    `RRef.to_here` raises the function's error, if any.

    Args:
        to, func, args, kwargs, timeout: As for `rpc_sync`.

    Returns: A reference owned by the rank that was called.
    """
    client = current_agent().client
    reference: RRef[Any] = client.make(*client.target(to, func, args), kwargs, timeout)
    return reference


class Client:
    """Makes calls, and waits for their replies.

    Args:
        agent: The agent whose client this is.
        channel: Channel that sends the requests.
        dispatcher: Dispatcher of received messages; a thread that waits for a reply polls it.
        workers: Threads that run functions; a function that waits for another rank does not count as running.
        references: Table that creates and counts references.
        timeout_s: Default timeout, in seconds.

    Attributes:
        calls: The pending calls.
        replies: Object that completes calls, with replies or errors.
    """

    def __init__(
        self,
        agent: Peers,
        channel: MessageChannel,
        dispatcher: Dispatcher,
        workers: Workers,
        references: RRefContext,
        timeout_s: float,
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._dispatcher = dispatcher
        self._workers = workers
        self._references = references
        self._timeout_s = timeout_s
        self._ranks: dict[Any, int] = {key: info.id for info in agent.infos for key in (info, info.id, info.name)}
        self.calls: PendingCalls = PendingCalls(len(agent.infos))
        self.replies: Replies = Replies(channel, self.calls)

    def rank_of(self, to: Any) -> int:
        """Return the rank of a worker, given its name, rank or `WorkerInfo`. Raises ValueError if no worker matches."""
        rank = self._ranks.get(to) if isinstance(to, Hashable) and not isinstance(to, bool) else None
        if rank is None:
            known = ", ".join(f"{info.name!r} ({info.id})" for info in self._agent.infos[:16])
            raise ValueError(f"unknown rank {to!r}; known: {known}")
        return rank

    def target(self, to: Any, func: Callable[..., Any], args: Any) -> tuple[int, str, Key | None, tuple[Any, ...]]:
        """Return the rank, function name, object key and arguments of a call.

        A function without a name is sent only to trusted peers.
        """
        if type(args) is not tuple and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
            # Also reject a tensor: it could be unpacked into arguments, but the caller probably just forgot a comma.
            raise TypeError(
                f"args must be a tuple of arguments, not a {type(args).__name__}; for a single argument pass args=(x,)"
            )
        exposed = self._channel.exposed
        peer = self.rank_of(to)
        try:
            name = name_of(func)
        except TypeError:
            if not exposed.trusted:
                raise
            name = ""
        if exposed.trusted and not exposed.finds(name, func):
            return peer, "@call", None, (func, *args)
        return peer, name, None, tuple(args)

    def call(
        self, peer: int, target: str, key: Key | None, args: _Args, kwargs: _Kwargs, timeout: Timeout | None
    ) -> Any:
        """Call a function, or a method of the object with this key, and wait for the result."""
        call = self._new_call(peer, target, timeout)
        self._request(call, key, args, kwargs)
        if not call.done:
            self._wait(call)
            if not call.done and not self.replies.give_up(call, call.timeout_error()):
                # Another thread is about to complete the call, so wait for it.
                call.sleep(SEND_S)
        return self.replies.result(call)

    def start(
        self, peer: int, target: str, key: Key | None, args: _Args, kwargs: _Kwargs, timeout: Timeout | None
    ) -> CallFuture:
        """Start a call and return its future immediately."""
        call = self._new_call(peer, target, timeout)
        future = self._add_future(call)
        self._request(call, key, args, kwargs)
        return future

    def make(
        self, peer: int, target: str, key: Key | None, args: _Args, kwargs: _Kwargs, timeout: Timeout | None
    ) -> RRef[Any]:
        """Start a call that leaves its result on the callee."""
        call = self._new_call(peer, target, timeout)
        future = self._add_future(call)
        new = self._references.new_key(peer)
        try:
            self._request(call, key, args, kwargs, new.number)
        except CommError:
            # The request may have reached the owner despite the error, so release the reference there.
            self._references.dropped(peer, new)
            raise
        except Exception:
            self._references.unused(peer, new)
            raise
        return cast(RRef[Any], self._references.reference(peer, new, future))

    def _new_call(self, peer: int, target: str, timeout: Timeout | None) -> PendingCall:
        seconds = self._timeout_s if timeout is None else positive_timeout(timeout)
        return PendingCall(self.calls.number(), peer, target, seconds)

    def _add_future(self, call: PendingCall) -> CallFuture:
        call.future = CallFuture(partial(self._wait, call), lambda: self.replies.give_up(call, call.cancelled_error()))
        return call.future

    def _request(self, call: PendingCall, key: Key | None, args: _Args, kwargs: _Kwargs, result: int = 0) -> None:
        if self._agent.closed:
            raise self.closed_error()
        channel = self._channel
        calls = self.calls
        peer = call.peer
        name = call.name.encode("utf-8", "surrogatepass")
        head = protocol.REMOTE if result else protocol.REQUEST, call.number, context.get()
        call_head = CALL.pack(result, *(key or (-1, 0)), len(name), len(args)) + name
        values = (*args, kwargs) if kwargs else args
        content, bodies, undo = channel.pack(peer, head, values, call_head, len(args))
        call.nbytes = len(content) + sum(map(torch.numel, bodies))
        window = calls.windows[peer]
        if not window.enter(call.nbytes, nested=request.get() is not None):
            with self._workers.not_counted():
                entered = window.enter(call.nbytes, call.started + call.timeout)
            if not entered:
                rollback(undo)
                raise call.timeout_error()
        # Add the call before sending it, because the reply may arrive before `post` returns.
        if calls.add(call):
            # Wake the receiving thread, which may be asleep until a deadline later than this call's.
            channel.box.wake()
        try:
            channel.post(peer, content, bodies, min(call.timeout, SEND_S), undo)
        except BaseException as error:
            # Even on an interrupt, a call that no peer will answer must not remain pending.
            if channel.may_arrive(peer, error):
                # The peer may still receive the request. It then serves the request, or finds that it was cancelled.
                calls.abandon(call)
                self.replies.cancel(call)
            else:
                # `post` has already run the actions in `undo`.
                calls.retract(call)
            raise
        if self._agent.closed or peer in self._dispatcher.ended:
            # The peer left or this agent was closed while this call was being sent. Fail the call here, because it may
            # have been added too late to fail with the other pending calls.
            self.replies.fail(call, self.closed_error() if self._agent.closed else channel.box.lost[peer])

    def _wait(self, call: PendingCall) -> None:
        """Wait until a call has ended or timed out."""
        task = self._dispatcher.poll_for(call)
        if task is not None:
            run_task(task)
        if not call.done:
            with self._workers.not_counted():
                call.sleep(call.timeout - (clock.now() - call.started))

    def close(self) -> None:
        """End open calls with an error.

        The agent is already closed: a thread that sends a new call adds the call to the table, and only then checks
        whether the agent is closed.
        """
        for call in self.calls.open():
            self.replies.fail(call, self.closed_error())

    def closed_error(self) -> ClosedError:
        """Return the error for calls on a closed agent."""
        rank = self._channel.rank
        size = len(self._agent.infos)
        return ClosedError("the RPC agent of this rank is shut down", rank=rank, size=size, operation="rpc")
