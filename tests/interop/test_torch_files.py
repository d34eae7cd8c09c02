"""The program that runs torch's own test files on a backend and on gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_files import compared, on_cpu, table

SAMPLE = Path(__file__).with_name("torch_files_sample.py")
KINDS = "object or scatter or gather or ddp_broadcast or sparse or send_recv or coalesced"
CHOSEN = f"({KINDS}) and not (cuda or nccl or profiler)"

TEXT = '''"""Tests."""
from __future__ import annotations
@unittest.skipIf(not TEST_CUDA, "no cuda")
def test(self):
    torch.cuda.set_device(self.rank)
    torch.ones(2, device="cuda:0").cuda(self.rank)
    init_device_mesh('cuda', (2,))
    torch.device("cuda", self.rank)
    model.to(self.rank), f"cuda:{self.rank}", "rank:1/cuda:1", torch.cuda.current_device()
    DDP(model, device_ids=[self.rank]), torch.empty(2, device=self.rank)
    self.assertRaisesRegex(RuntimeError, r"device\\(type='cuda'")
'''


def test_files_of_tests_name_the_cpu_for_cuda() -> None:
    written = on_cpu(TEXT, "unisono")
    assert "cuda" not in written
    assert "self.rank" not in written
    assert written.index("__future__") < written.index("torch_files.patch('unisono')") < written.index("def test")
    compile(written, "tests", "exec")


def test_table_counts_by_file_and_lists_what_passes_on_gloo_only() -> None:
    found = {
        "test_a::A.one": ("passed", "passed"),
        "test_a::A.two": ("passed", "ValueError: no"),
        "test_a::A.three": ("skipped", "did not run"),
        "test_ab::A.one": ("RuntimeError: no", "passed"),
    }
    header, first, second, *lost = table(found).splitlines()
    assert header.split() == ["file", "tests", "gloo", "unisono", "gloo", "only"]
    assert [first.split(), second.split()] == [["test_a", "3", "2", "1", "1"], ["test_ab", "1", "0", "1", "0"]]
    assert lost == ["test_a::A.two: ValueError: no"]


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_sample_of_torchs_tests_passes_as_on_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "3", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "100"}.items():
        monkeypatch.setenv(name, value)
    found = compared([SAMPLE], chosen=CHOSEN)
    assert [name for name, (gloo, here) in found.items() if gloo == "passed" != here] == []
    assert 25 <= [gloo for gloo, _ in found.values()].count("passed") <= 60
