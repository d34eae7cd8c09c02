"""Every form of a call in torch's own signatures does on unisono what it does on gloo."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch_ranks import message, on_ranks

import unisono as un

WIDE_OUTPUT = {"allgather", "allgather_coalesced", "alltoall", "gather"}
WIDE_INPUT = {"alltoall", "reduce_scatter", "scatter"}
"""Calls with one tensor for each rank, on that side."""
LONG_OUTPUT = "^(all_gather_single|_allgather_base|allgather_into|all_to_all_single|alltoall_base)"
LONG_INPUT = "^(_?reduce_scatter_(single|base|tensor)|all_to_all_single|alltoall_base)"
"""Calls with one tensor that is cut by ranks, on that side."""

Parameter = tuple[str, str, bool]


def signatures() -> Iterator[tuple[type, str, list[Parameter]]]:
    """Of each call: its class and name, and for each parameter its name, its type, and whether it has a default."""
    for owner in (dist.ProcessGroup, _distributed_c10d.Backend):
        for name, method in vars(owner).items():
            if name in ("gather_into_tensor", "gather_single"):
                # Gloo has none.
                continue
            lines = rf"^(?:\d+\. )?{name}\(self: [\w.]+(.*)\) -> (?:c10d::Work|None)"
            for text in re.findall(lines, method.__doc__ or "", re.MULTILINE):
                found = re.findall(r", (\w+): (.+?)( = .*?)?(?=, \w+: |$)", text)
                if "barrier" in name or any("Tensor" in kind for _, kind, _ in found):
                    yield owner, name, [(one, kind, bool(default)) for one, kind, default in found]


def value(call: str, name: str, kind: str, root: int) -> Any:
    """An argument of a call, for two ranks."""
    rank = dist.get_rank()
    if "Tensor" in kind:
        output = name.startswith("output")
        wide = call in (WIDE_OUTPUT if output else WIDE_INPUT)
        numel = 4 if re.search(LONG_OUTPUT if output else LONG_INPUT, call) else 2
        row = [torch.arange(1.0, 1 + numel) + 10 * rank + 100 * i for i in range(1 + wide)]
        if call in ("gather", "scatter") and wide and rank != root:
            row = []
        depth = len(re.findall(r"(?i)sequence\[|list\[", kind))
        if call == "allgather_coalesced" and output:
            return [[tensor] for tensor in row]
        return row[0] if depth == 0 else [row] if depth == 2 and row else row
    if kind.endswith("Options"):
        options = getattr(_distributed_c10d, kind.rsplit(".", 1)[1])()
        for attribute, given in {"rootRank": root, "reduceOp": dist.ReduceOp.MAX}.items():
            if hasattr(options, attribute):
                setattr(options, attribute, given)
        return options
    others = {"op": dist.ReduceOp.MAX, "timeout": timedelta(seconds=5), "wait_all_ranks": False, "tag": 3, "arg1": 3}
    peers = {"root": root, "dstRank": 1, "srcRank": 0, "output_split_sizes": [2, 2], "input_split_sizes": [2, 2]}
    return (others | peers)[name]


def outcome(group: Any, call: str, form: list[Parameter], *, by_name: bool, short: bool) -> str:
    """What is in the tensors after a call, or its error."""
    chosen = [(name, kind) for name, kind, default in form if not (short and default)]
    # Where the root is left out, it is rank 0.
    root = 0 if short and len(chosen) < 3 and not any(name == "root" for name, _ in chosen) else 1
    given = {name: value(call, name, kind, root) for name, kind in chosen}
    if call == "send" and dist.get_rank() == 1:
        call, given = "recv", {"tensors": given["tensors"], "srcRank": 0, "tag": 3}
    elif "recv" in call and dist.get_rank() == 0:
        given = {"tensors": next(iter(given.values())), "dstRank": 1, "tag": 3}
        call = "send"

    def ended() -> None:
        work = getattr(group, call)(**given) if by_name else getattr(group, call)(*given.values())
        if work is not None:
            work.wait()

    text = message(ended)
    if call == "reduce" and dist.get_rank() != root:
        # Where gloo leaves part of the result.
        return text
    return f"{text} {[(name, given[name]) for name, kind in chosen if 'Tensor' in kind and name in given]}"


def compare() -> dict[str, list[str]]:
    gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=5))
    found = {}
    for owner, call, form in signatures():
        groups = [gloo, dist.group.WORLD]
        if owner is _distributed_c10d.Backend:
            groups = [group._get_backend(torch.device("cpu")) for group in groups]
        for by_name in (False, True)[: 1 if form[0][0] == "arg0" else 2]:
            for short in (False, True):
                given = ", ".join(name for name, _, default in form if not (short and default))
                label = f"{owner.__name__}.{call}({given}){' by name' if by_name else ''}"
                found[label] = [outcome(group, call, form, by_name=by_name, short=short) for group in groups]
    return found


def test_every_form_does_what_it_does_on_gloo(tmp_path: Path) -> None:
    for found in on_ranks(compare, 2, tmp_path):
        assert [f"{label}: gloo: {gloo}; here: {here}" for label, (gloo, here) in found.items() if gloo != here] == []
        assert [label for label, (gloo, _) in found.items() if not gloo.startswith("no error")] == []
        assert len(found) > 60


def wrong() -> list[str]:
    group: Any = dist.group.WORLD
    t = torch.ones(3)
    options = _distributed_c10d.AllreduceOptions()
    calls = [
        group.broadcast,
        lambda: group.broadcast(t, "0"),
        lambda: group.broadcast(t, 0, 5),
        lambda: group.broadcast(t, 0, dist.ReduceOp.MAX),
        lambda: group.broadcast(3.5, 0),
        lambda: group.broadcast([t, 3.5], 0),
        lambda: group.allreduce(t, "sum"),
        lambda: group.allreduce(t, options, dist.ReduceOp.MAX),
        lambda: group.allreduce(t, opts=options, op=dist.ReduceOp.MAX),
        lambda: group.allreduce(t, ops=dist.ReduceOp.MAX),
        lambda: group.allgather([t, t], [t]),
        lambda: group.allgather([[t, t], [t, t]], [t]),
        lambda: group.allgather([t, t], [t], _distributed_c10d.AllgatherOptions()),
        lambda: group.gather([t, t], [t], _distributed_c10d.GatherOptions()),
        lambda: group.scatter([t], [t, t], _distributed_c10d.ScatterOptions()),
        lambda: group.reduce_scatter([t], [t, t], _distributed_c10d.ReduceScatterOptions()),
        lambda: group.send([t]),
        lambda: group.barrier("soon"),
    ]
    errors = [message(call) for call in calls]
    # Nothing has moved, and nothing is broken.
    group.allreduce(t).wait()
    return [*errors, str(t.tolist())]


def test_arguments_of_no_form_are_an_error_before_anything_moves() -> None:
    for errors in un.testing.torch_ranks(2, "thread").run(wrong):
        assert [text for text in errors[:-1] if not text.startswith("TypeError: ")] == []
        assert errors[-1] == "[2.0, 2.0, 2.0]"
        assert "missing a required argument: 'tensors'; call broadcast(tensors, root=0, timeout=None)" in errors[0]


def beside_calls() -> list[Any]:
    group: Any = dist.group.WORLD
    numbers = [group._get_sequence_number_for_group()]
    for call in (
        dist.barrier,
        lambda: group.allreduce(torch.ones(1)).wait(),
        lambda: group.broadcast(torch.ones(1), 1),
    ):
        call()
        numbers.append(group._get_sequence_number_for_group() - numbers[0])
    group.set_timeout(timedelta(seconds=7))
    options = group._get_backend(torch.device("cpu")).options
    group.get_group_store().set("key", "value")
    return [*numbers[1:], options.backend, options._timeout.total_seconds()]


def test_a_group_counts_its_calls_and_knows_its_options() -> None:
    assert un.testing.torch_ranks(2, "thread").run(beside_calls) == [[1, 2, 3, "unisono", 7.0]] * 2
