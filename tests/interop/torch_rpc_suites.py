"""Torch's own tests of RPC on our module: `python torch_rpc_suites.py RpcTest` runs a class of them.

The modules of these tests come with torch. They are imported with our module under the name of torch's, so that
neither they nor the decorators in them know of any other; each test runs on forked ranks, as many as it asks for.
For each test one line of JSON goes to the standard output: its name, and the text of its failure, or null.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import torch.distributed.autograd
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc
import torch.multiprocessing


def replace() -> None:
    """Replace torch's public names by those of this package. Private names stay: they find no agent of torch."""
    from unisono.interop import torch_rpc as ours

    public = {name: getattr(ours, name) for name in ours.__all__}
    _shadow("rpc", public)
    _shadow("autograd", {name: getattr(ours.dist_autograd, name) for name in ours.dist_autograd.__all__})
    torch.distributed.optim.DistributedOptimizer = ours.DistributedOptimizer
    torch.distributed.nn.RemoteModule = ours.RemoteModule


def _shadow(name: str, public: dict[str, Any]) -> None:
    torchs = getattr(torch.distributed, name)
    shadow = types.ModuleType(torchs.__name__)
    vars(shadow).update(vars(torchs) | public)
    sys.modules[torchs.__name__] = shadow
    setattr(torch.distributed, name, shadow)


_SUITES = {
    "ddp_under_dist_autograd_test": ["DdpUnderDistAutogradTest", "DdpComparisonTest"],
    "nn.api.remote_module_test": ["RemoteModuleTest", "ThreeWorkersRemoteModuleTest"],
    "rpc.dist_autograd_test": ["DistAutogradTest", "TensorPipeAgentDistAutogradTest"],
    "rpc.dist_optimizer_test": ["DistOptimizerTest"],
    "rpc.examples.parameter_server_test": ["ParameterServerTest"],
    "rpc.examples.reinforcement_learning_rpc_test": ["ReinforcementLearningRpcTest"],
    "rpc.rpc_test": ["RpcTest", "TensorPipeAgentRpcTest"],
}


def suites(limit: int) -> Iterator[type[unittest.TestCase]]:
    """Torch's classes of tests that run without a GPU and without TorchScript, each on ranks that are forked."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import TensorPipeRpcAgentTestFixture

    common_distributed.TIMEOUT_DEFAULT = limit

    class Fixture(TensorPipeRpcAgentTestFixture, common_distributed.MultiProcessTestCase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @property
        def rpc_backend(self) -> Any:
            return torch.distributed.rpc.BackendType.TENSORPIPE

        @property
        def rpc_backend_options(self) -> Any:
            return torch.distributed.rpc.TensorPipeRpcBackendOptions(init_method=self.init_method)

        def get_timeout_error_regex(self) -> str:
            return "timed out|RPC ran for more than"

    for module, names in _SUITES.items():
        known = importlib.import_module(f"torch.testing._internal.distributed.{module}")
        for name in names:
            yield type(name, (getattr(known, name), Fixture), {"__module__": __name__})


def failure(test: unittest.TestCase) -> str | None:
    """Run a test: the text of its failure, or None."""
    result = unittest.TestResult()
    test.run(result)
    return next((text for _, text in [*result.errors, *result.failures, *result.skipped]), None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="*", help="RpcTest, or RpcTest.test_add; all if none is named")
    parser.add_argument("--torch", action="store_true", help="run them on torch's own RPC")
    parser.add_argument("--limit", type=int, default=90, help="seconds for a test")
    given = parser.parse_args()
    if not given.torch:
        replace()
    loader, outcomes = unittest.TestLoader(), sys.stdout
    # What tests print would be among the outcomes.
    sys.stdout = sys.stderr
    for suite in suites(given.limit):
        for name in loader.getTestCaseNames(suite):
            test = f"{suite.__name__}.{name}"
            if not given.tests or {suite.__name__, test} & set(given.tests):
                print(json.dumps([test, failure(suite(name))]), file=outcomes, flush=True)


if __name__ == "__main__":
    main()
