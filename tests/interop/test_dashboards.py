"""The blocks of docs/how-to/dashboards.md write what `Metrics.scalars()` returns, as each tool reads it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "dashboards.md").read_text()
FIRST = PAGE.partition("```python\n")[2].partition("```")[0]
SECTIONS = (section.split("\n", 1) for section in PAGE.split("\n## ")[1:])
BLOCKS = {name: text.partition("```py\n")[2].partition("```")[0] for name, text in SECTIONS if "```py\n" in text}

# What a reader finds must be every name, with the values of the totals.
EXPECTED = """
wanted = metrics.scalars()
assert len(wanted) == 4, wanted
"""
BEFORE = {
    "OpenTelemetry": """
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
set_meter_provider(MeterProvider([reader]))
"""
}
AFTER = {
    "TensorBoard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

read = EventAccumulator(folder)
read.Reload()
assert set(read.Tags()["scalars"]) == wanted.keys()
for name, value in wanted.items():
    (event,) = read.Scalars(name)
    assert (event.step, event.value) == (2, torch.tensor(value).item())
""",
    "Weights & Biases": """
import glob, json

# The service writes the file to its end before it ends.
wandb.teardown()
# The file holds records of protobuf, in which each value is JSON text.
(file,) = glob.glob(folder + "/wandb/offline-run-*/*.wandb")
data = open(file, "rb").read()
for name, value in wanted.items():
    _, _, rest = data.partition(name.encode())
    assert json.dumps(value).removesuffix(".0").encode() in rest[:40], (name, rest[:40])
""",
    "MLflow": """
client = mlflow.MlflowClient()
found = mlflow.last_active_run()
assert found.data.metrics == wanted
for name in wanted:
    assert [each.step for each in client.get_metric_history(found.info.run_id, name)] == [2]
""",
    "OpenTelemetry": """
found = {}
for resource in reader.get_metrics_data().resource_metrics:
    for metric in resource.scope_metrics[0].metrics:
        (point,) = metric.data.data_points
        found[metric.name] = point.value
        assert point.attributes == {"rank": 0}
assert found == wanted
""",
    "Prometheus": """
import urllib.request

text = urllib.request.urlopen("http://127.0.0.1:9400/metrics", timeout=30).read().decode()
families = {family.name: family for family in text_string_to_metric_families(text)}
labels = {"operation": "all_reduce", "rank": "0"}
for name, kind, total, value in (
    ("unisono_calls", "counter", "unisono_calls_total", wanted["unisono/all_reduce/calls"]),
    ("unisono_bytes", "counter", "unisono_bytes_total", wanted["unisono/all_reduce/bytes"]),
    ("unisono_call_seconds", "histogram", "unisono_call_seconds_sum", wanted["unisono/all_reduce/seconds"]),
    ("unisono_wait_seconds", "histogram", "unisono_wait_seconds_sum", wanted["unisono/all_reduce/wait_seconds"]),
):
    assert families[name].type == kind
    assert families[name].documentation
    assert [each.value for each in families[name].samples if each.name == total and each.labels == labels] == [value]
""",
}


def test_every_block_is_read_back() -> None:
    assert BLOCKS.keys() == AFTER.keys()


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(AFTER))
def test_dashboard_reads_the_scalars(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FIRST + BEFORE.get(name, "") + BLOCKS[name] + EXPECTED + AFTER[name])
    environment = {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(
        [sys.executable, program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.soak
def test_prometheus_parser_accepts_the_text_of_several_operations() -> None:
    import torch
    from prometheus_client.parser import text_string_to_metric_families

    import unisono as un

    metrics = un.Metrics()
    assert {family.type for family in text_string_to_metric_families(metrics.prometheus())} == {"counter", "histogram"}
    with un.init() as comm, metrics.recording():
        comm.barrier()
        comm.all_reduce(torch.ones(3))
        comm.all_reduce(torch.ones(3), async_op=True).wait()
    families = {family.name: family for family in text_string_to_metric_families(metrics.prometheus())}
    assert families.keys() == {"unisono_calls", "unisono_bytes", "unisono_call_seconds", "unisono_wait_seconds"}
    assert all(family.documentation for family in families.values())
    calls = {sample.labels["operation"]: sample.value for sample in families["unisono_calls"].samples}
    assert calls == {"barrier": 1, "all_reduce": 2}
    for family in (families["unisono_call_seconds"], families["unisono_wait_seconds"]):
        for operation in calls:
            of = [each for each in family.samples if each.labels["operation"] == operation]
            rows = [each.value for each in of if each.name.endswith("_bucket")]
            (count,) = (each.value for each in of if each.name.endswith("_count"))
            assert rows == sorted(rows)
            assert rows[-1] == count
