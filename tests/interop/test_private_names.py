"""Torch's private names that the code relies on: each is still there, and no others are used.

When one is gone: the second text of its row says what to use instead, or how to do without.
"""

from __future__ import annotations

import ast
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

SOURCE = Path(__file__).parents[2] / "src" / "unisono"

PARAMETER, MODULE, BATCH_NORM = nn.Parameter(torch.ones(1)), nn.Linear(1, 1), nn.BatchNorm1d(1)

NAMES: dict[str, tuple[Any, str, str]] = {
    # name: (where it is, by its path if that is private, what breaks without it, what to do then)
    "_BatchNorm": (nn.modules.batchnorm, "SyncBatchNorm.convert finds no layers", "list the public BatchNorm classes"),
    "_C": (torch, "all rows that name it", "see there"),
    "_DistributedBackendOptions": (
        dist.distributed_c10d,
        "plug-in backends beside unisono",
        "pass the object that torch gave to `_create`",
    ),
    "_NormBase": (nn.modules.batchnorm, "BatchNorm is loaded aside, not in place: slower", "drop it from `_adapts`"),
    "_autograd": ("torch._C", "freed parameters keep their version", "see _unsafe_set_version_counter"),
    "_backward_hooks": (PARAMETER, "hooks of two averagers on one model are not told apart", "keep a registry of ours"),
    "_cdata": (torch.Generator(), "draws from a default generator that is passed are the process's", "compare objects"),
    "_current_autograd_node": ("torch._C", "errors in backward name no layer", "leave the name out"),
    "_current_graph_task_id": ("torch._C", "passes of two threads are mixed up", "one lock for each backward()"),
    "_destroy": (torch.library.Library, "random operators cost more after ranks that are threads", "keep the library"),
    "_dispatch_get_all_op_names": ("torch._C", "ranks that are threads must not seed", "a list of random operators"),
    "_dispatch_has_kernel_for_dispatch_key": ("torch._C", "as the row above", "as the row above"),
    "_dispatch_keyset_full_after": ("torch._C", "as the row above", "override the CPU's kernels, through get_kernel"),
    "_dispatch_tls_is_dispatch_key_excluded": (
        "torch._C",
        "collectives under a mode while torch dispatch is disabled raise",
        "call directly where an operator reaches no kernel",
    ),
    "_disable_current_modes": ("torch.utils._python_dispatch", "reductions under FakeTensorMode", "refuse modes"),
    "_distributed_c10d": (
        "torch._C",
        "hooks that attach themselves are not called",
        "distributed_c10d has NanCheckHook",
    ),
    "_dynamo": (torch, "an optimizer is tried while another thread compiles", "a lock of our own, for the stance"),
    "_engine_run_backward": (
        torch.autograd.graph,
        "backward passes that end by an error are not cleaned up",
        "wrap torch.autograd.backward and grad",
    ),
    "_execution_engine": (
        torch.autograd.Variable,
        "gradients are not averaged at the end of backward",
        "torch.autograd.graph.register_multi_grad_hook on all parameters",
    ),
    "_foreach_copy_": (torch, "copies into buckets take one call each", "copy_ in a loop"),
    "_functorch": ("torch._C", "wrapped tensors of vmap and grad are taken for plain ones", "torch.func's public test"),
    "_get_default_store": (dist.distributed_c10d, "a watch finds no processes", "a store of ours, by MASTER_ADDR"),
    "_indices": (
        torch.ones(1),
        "uncoalesced sparse tensors cannot be sent in remote calls",
        "coalesce a copy, and send its indices() and values()",
    ),
    "_is_profiler_enabled": (torch.autograd.profiler, "calls are not shown in profiles", "record_function always"),
    "_len_torch_dispatch_stack": ("torch._C", "CommDebugMode sees no collectives", "make watched calls directly"),
    "_load_from_state_dict": (MODULE, "modules that adapt what they load are not noticed", "load all aside"),
    "_load_state_dict_post_hooks": (MODULE, "as the row above", "load all aside"),
    "_load_state_dict_pre_hooks": (MODULE, "as the row above", "load all aside"),
    "_plugins": (dist.Backend, "backends of other packages", "Backend.register_backend's own table, by name"),
    "_post_accumulate_grad_hooks": (
        PARAMETER,
        "hooks of two averagers on one model are not told apart",
        "keep a registry of ours",
    ),
    "_record_function_with_args_enter": (torch.autograd, "as the row above", "torch.profiler.record_function"),
    "_record_function_with_args_exit": (torch.autograd, "as the row above", "torch.profiler.record_function"),
    "_register_backend": (dist.ProcessGroup, "other devices beside unisono", "torch's own group, by its name"),
    "_schema": (torch.ops.aten.add_.Tensor, "`bench` measures no traffic", "count bytes by the tensors' sizes"),
    "_set_default_backend": (dist.ProcessGroup, "other devices beside unisono", "as for _register_backend"),
    "_set_thread_isolation_mode": (
        "torch._C._distributed_c10d",
        "functional collectives find another rank's group, where a test's ranks are threads",
        "names of groups that differ by rank",
    ),
    "_unsafe_set_version_counter": (
        "torch._C._autograd",
        "a sharded parameter that is freed and gathered looks modified to autograd",
        "torch.autograd.graph.increment_version, and saved tensors as hooks",
    ),
    "_use_count": (torch.ones(1), "buffers that hooks still hold are overwritten", "sys.getrefcount, and a copy"),
    "_will_engine_execute_node": ("torch._C", "unused parameters are found at the end of the pass only", "wait for it"),
    "_worker_info": ("torch.utils.data._utils.worker", "streams are split twice in workers", "refuse num_workers > 0"),
}
PRIVATE_MODULES = {
    "torch._C",
    "torch._C._dynamo",
    "torch._C._distributed_c10d",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch.utils.data._utils",
}
NOT_TORCHS = {
    # Python's own, and those of the packages that a file is about; `_inst` is of `random`, `_rand` of NumPy.
    "_Environ", "_PyRLock", "_PySimpleQueue", "_StorageInfo", "_args_from_interpreter_flags", "_asdict", "_boundary_",
    "_current_frames", "_exit", "_flag_mask_", "_getframe", "_hypothesis_internal_use_settings", "_inst",
    "_member_type_", "_rand", "_replace", "_showtraceback", "_value2member_map_", "_value_",
    "_write_to_self", "_xoptions",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_name_exists(name: str) -> None:
    place, breaks, instead = NAMES[name]
    place = resolve_name(place) if isinstance(place, str) else place
    assert hasattr(place, name), f"torch has {name} no longer: {breaks}. Instead: {instead}"


def test_disabling_modes_is_a_context() -> None:
    with resolve_name("torch.utils._python_dispatch:_disable_current_modes")():
        assert torch.ones(1).item() == 1


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_other_private_name_is_used() -> None:
    """An attribute that nothing here defines is another package's."""
    used, imported, defined = set[str](), set[str](), set[str]()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _private(node.attr):
                own = isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load)
                (defined if own and node.value.id in ("self", "cls", "made") else used).add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                used |= {alias.name for alias in node.names if _private(alias.name)}
                parts = (node.module or "").split(".")
                imported |= {node.module or "" for part in parts if _private(part)}
    assert used - defined - NOT_TORCHS == set(NAMES), "of torch's private names, the table lacks some or has too many"
    assert imported == PRIVATE_MODULES
    assert all(map(resolve_name, PRIVATE_MODULES))
