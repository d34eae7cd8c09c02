"""One rank's hooks, and the passes of its program, whether its gradients are averaged or not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from averager_graphs import Graph, trap
from averager_memory import OwnMemory
from averager_programs import ROWS, SAMPLES, WIDTH, Case, Failure, Hook, Pass, Place, Step
from torch import nn

__all__ = ["InnerError", "PlannedError", "Worker"]


class PlannedError(Exception):
    """Raised in a pass because the program says so."""


class InnerError(Exception):
    """Raised in a hook's own pass, and caught by the hook."""


class Worker:
    """A rank of a program. Alone it does what torch does; with an averager its passes are averaged.

    Attributes:
        parameters: Of the model, by name.
        seen: What hooks saw in the last pass, in the order of time.
        touched: The parameters whose gradient the last pass has added to, after `track`.
        before: What each p.grad held before the last pass.
        own: Which of them were tensors of the user's.
        plan: What is to go wrong in the running attempt.
        weight: What the rank passed to `weight` for the next averaged pass.
        memory: The tensors of the user's that are p.grad.
        scaler: A GradScaler, or None.
        around: Called with a function that makes the backward pass.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.model = Graph(case, rank)
        self.parameters = dict(self.model.named_parameters())
        self.seen: list[tuple[str, torch.Tensor]] = []
        self.touched = set[str]()
        self.before = dict[str, torch.Tensor]()
        self.own = list[str]()
        self.plan: Failure | None = None
        self.weight: float | None = None
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1) if "scaler" in case.amp else None
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=0.0)
        self.memory = OwnMemory(self.parameters, case.memory)
        self.around: Callable[[Callable[[], None]], None] = lambda backward: backward()
        self._live, self._fired = False, set[int]()
        self._roots: list[torch.Tensor] = []
        self._ahead: list[torch.Tensor] = []
        self._call: Callable[..., torch.Tensor] = self.model
        self._values = {hook.place.index for hook in case.hooks if hook.place.kind == "value"}
        places = [place for step in case.steps if step.failure for place in step.failure.places if place]
        self._values |= {place.index for place in places if place.kind == "value"}
        self._hooked = {p.name for p in places} | {hook.place.name for hook in case.hooks}
        self.freeze(case.frozen)
        self.hook("early")

    # -- hooks ----------------------------------------------------------------------------------
    def hook(self, kind: str) -> None:
        """Register the hooks on parameters that come before the averager's, or those that come after them."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and (kind in self.case.record or name in self._hooked):
                parameter.register_post_accumulate_grad_hook(partial(self._accumulated, kind, name))

    def track(self) -> None:
        """Note which parameters are touched."""
        for name, parameter in self.parameters.items():
            trains = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(partial(self._touch, name))
            parameter.requires_grad_(trains)

    def _touch(self, name: str, parameter: torch.Tensor) -> None:
        # Torch calls hooks of a parameter that has been frozen since the forward, too.
        if parameter.requires_grad:
            self.touched.add(name)

    def watch(self, index: int, value: torch.Tensor) -> None:
        """Register the hooks on a value."""
        if index in self._values and value.requires_grad:
            place = Place("value", index)
            value.register_hook(lambda gradient: self.arrive(place))

    def _accumulated(self, kind: Any, name: str, parameter: torch.Tensor) -> None:
        if kind in self.case.record and self._live:
            grad = parameter.grad
            sight = torch.empty(0) if grad is None else grad.detach().to_dense().clone()
            self.seen.append((f"{kind} {name}", sight))
        self.arrive(Place(kind, name=name))

    def arrive(self, place: Place) -> None:
        """Do what is planned here, and what hooks do here."""
        if not self._live:
            return
        if self.plan is not None and self.plan.places[self.rank] == place:
            plan, self.plan = self.plan, None
            self._go_wrong(plan, place)
        for number, hook in enumerate(self.case.hooks):
            if hook.place == place and self.rank in hook.ranks and number not in self._fired:
                self._fired.add(number)
                self._act(hook)

    def _go_wrong(self, plan: Failure, place: Place) -> None:
        if plan.how == "raise":
            raise PlannedError(place)
        parameter = self.parameters[place.name]
        if plan.how == "take":
            parameter.grad = None
        elif parameter.grad is not None:
            with torch.no_grad():
                parameter.sub_(torch.zeros_like(parameter))
                parameter.grad.zero_()

    def _act(self, hook: Hook) -> None:
        if hook.action in ("halve", "replace"):
            parameter = self.parameters[hook.place.name]
            # Torch calls it for one that was frozen after its forward, too. An averager undoes what it does there.
            if not parameter.requires_grad:
                return
            with torch.no_grad():
                if hook.action == "halve" and parameter.grad is not None:
                    parameter.grad.mul_(0.5)
                elif parameter.grad is not None:
                    parameter.grad = parameter.grad * 1.5
            return
        targets = [self.parameters[name] for name in hook.targets if self.parameters[name].requires_grad]
        if not targets:
            return
        with torch.enable_grad():
            losses = [p.abs().square().sum() * (0.2 + 0.3 * self.rank) for p in targets]
            if hook.action == "grad":
                torch.autograd.grad(torch.stack(losses).sum(), targets)
            elif hook.action == "inner":
                torch.stack(losses).sum().backward()
            else:
                self._fail_inside(targets)

    def _fail_inside(self, targets: list[nn.Parameter]) -> None:
        def fails() -> None:
            raise InnerError

        # What is computed last comes first in the backward pass, so all targets but the first get a gradient.
        loss = trap(targets[0].abs().sum(), fails)
        for target in targets[1:]:
            loss = loss + target.abs().square().sum()
        with suppress(InnerError):
            loss.backward()

    # -- steps ----------------------------------------------------------------------------------
    def freeze(self, names: frozenset[str]) -> None:
        for name, parameter in self.parameters.items():
            parameter.requires_grad_(name not in names)

    def prepare(self, step: Step) -> None:
        """Begin a step, up to its first pass."""
        if step.aside is not None and self.rank in step.aside.ranks:
            self._do_aside(step.aside.kind, step.passes[0])
        if step.zero != "keep":
            self._zero({name: p for name, p in self.parameters.items() if name not in step.spared}, step.zero)
        numbers = self._numbers(step.passes[0])
        for name in sorted(step.given[self.rank]) if step.given else ():
            parameter = self.parameters[name]
            self.memory.give(name, torch.randn(parameter.shape, generator=numbers, dtype=parameter.dtype))

    def _zero(self, parameters: dict[str, nn.Parameter], how: str) -> None:
        if how == "own":
            self.memory.put(parameters)
        else:
            nn.ParameterList(parameters.values()).zero_grad(set_to_none=how == "none")

    def weigh(self, step: Step, number: int) -> float | None:
        """Return the argument of `weight` before the pass of this number."""
        if step.weights is None or number != step.weighed:
            return None
        self.weight = step.weights[self.rank]
        return self.weight

    def _do_aside(self, kind: str, one: Pass) -> None:
        """Use or load the model in a way that is no step of training."""
        inputs = *self._batch(one), one.skips[self.rank]
        if kind == "evaluate":
            with torch.no_grad():
                self.model(*inputs)
        elif kind == "copy":
            copy.deepcopy(self.model)(*inputs).sum().backward()
        elif kind == "functional":
            others = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
            torch.func.functional_call(self.model, others, inputs).sum().backward()
        elif kind == "load":
            self.model.load_state_dict({name: p.clone() for name, p in self.model.state_dict().items()})
        else:
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()

    def compile(self) -> None:
        """Compile the model, and for every second seed the whole pass.

        Not with hooks on values: Dynamo traces these, and takes what they read for constants.
        """
        self._call = torch.compile(self.model, backend="aot_eager")
        if self.case.seed % 2 and not self._values:
            self.run = torch.compile(self.run, backend="eager")  # type: ignore[method-assign]

    def run(
        self, one: Pass, *, ahead: str = "", following: Pass | None = None, reuse: bool = False, thread: bool = False
    ) -> None:
        """Make one pass: forward, unless that was made in the last pass, and backward."""
        if one.frozen is not None:
            self.freeze(one.frozen[self.rank])
        self.before = self.held()
        self.own = self.memory.holding()
        self._roots = self._ahead if reuse else self._forwards(one, ahead, following)
        if ahead == "graph":
            self._ahead = self._roots
        self._fired.clear()
        self.seen.clear()
        self.touched.clear()
        backward = partial(self.around, partial(self._backward, one, ahead == "graph"))
        self._live = True
        try:
            in_thread(backward) if thread else backward()
        finally:
            self._live = False
        self._roots = []
        if reuse:
            self._ahead = []

    def _forwards(self, one: Pass, ahead: str, following: Pass | None) -> list[torch.Tensor]:
        if following is not None and ahead == "before":
            self._ahead = self._forward(following)
        roots = self._forward(one)
        if following is not None and ahead == "after":
            self._ahead = self._forward(following)
        return roots

    def held(self) -> dict[str, torch.Tensor]:
        """Return the values of all gradients."""
        grads = {name: p.grad for name, p in self.parameters.items()}
        return {name: grad.detach().to_dense().clone() for name, grad in grads.items() if grad is not None}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the values of all buffers."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def load_buffers(self, values: dict[str, torch.Tensor]) -> None:
        """Give buffers these values; they are other tensors then, as those of a graph may not be written."""
        for name, value in values.items():
            owner, _, last = name.rpartition(".")
            setattr(self.model.get_submodule(owner), last, value.clone())

    def _numbers(self, one: Pass) -> torch.Generator:
        return torch.Generator().manual_seed((self.case.seed * 1009 + one.seed) * 7 + self.rank)

    def _batch(self, one: Pass) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = self._numbers(one)
        x = torch.randn(SAMPLES, WIDTH, generator=numbers, dtype=torch.float64).to(self.model.scales[0].dtype)
        return x.requires_grad_(), torch.randint(ROWS, (SAMPLES,), generator=numbers)

    def _forward(self, one: Pass) -> list[torch.Tensor]:
        x, rows = self._batch(one)
        self.watch(0, x)
        enabled = "autocast" in self.case.amp
        # Threads share the cache of casts.
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            out = self._call(x, rows, one.skips[self.rank], None if self.case.compiled else self)
        self.watch(len(self.case.nodes), out)
        roots = [out.square().sum()]
        if one.mode == "penalty":
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            roots = [roots[0] + slope.square().sum()]
        elif one.mode == "roots":
            roots = [out[:1].square().sum(), out[1:].sum()]
        if one.infinite == self.rank:
            roots = [root * float("inf") for root in roots]
        return roots if self.scaler is None else [self.scaler.scale(root) for root in roots]

    def _backward(self, one: Pass, retain: bool) -> None:
        inputs = [self.parameters[name] for name in one.inputs if self.parameters[name].requires_grad] or None
        torch.autograd.backward(
            self._roots, inputs=inputs, retain_graph=retain or None, create_graph=one.mode == "create_graph"
        )

    def finish(self, step: Step) -> None:
        """Update the parameters after an averaged pass."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif step.rate:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad.detach().to_dense(), alpha=step.rate)


def in_thread(call: Callable[[], None]) -> None:
    """Run it in a new thread, and raise what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
