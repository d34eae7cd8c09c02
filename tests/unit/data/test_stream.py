"""Streams and shards: every sample once over ranks and workers, also when a job goes on elsewhere."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pairwise import short
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unisono.data import ShardPartition, StreamPartition, read_lines

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
COUNT = 47


def stream(size: int, rank: int, **options: Any) -> StreamPartition[int]:
    return StreamPartition(range(COUNT), num_replicas=size, rank=rank, **options)


def loaded(dataset: Any, workers: int, batch: int) -> list[int]:
    return list(chain.from_iterable(b.tolist() for b in DataLoader(dataset, batch_size=batch, num_workers=workers)))


@given(
    count=st.integers(0, 60),
    path=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_remaining_stream_goes_to_the_other_ranks(count: int, path: list[int], data: st.DataObject) -> None:
    done: list[int] = []
    states: list[dict[str, Any]] = []
    for size in path:
        ranks = [StreamPartition(range(count), num_replicas=size, rank=rank) for rank in range(size)]
        for rank in ranks if states else ():
            rank.load_state_dict(states)
        held = [list(rank) for rank in ranks]
        assert sorted(chain(done, *held)) == list(range(count))
        assert max(map(len, held)) - min(map(len, held)) <= 1 or len(states) == size
        for rank, part in zip(ranks, held, strict=True):
            taken = data.draw(st.integers(0, len(part)))
            rank.advance(taken)
            done += part[:taken]
        states = [rank.state_dict() for rank in ranks]


def test_one_stream_state_serves_ranks_in_step() -> None:
    rank = stream(3, 1)
    rank.advance(4)
    alone = stream(1, 0)
    alone.load_state_dict(rank.state_dict())
    assert list(alone) == list(range(12, COUNT))
    assert alone.state_dict()["holes"] == []


def test_workers_share_a_stream_by_batches() -> None:
    plain = [list(stream(2, rank)) for rank in range(2)]
    assert plain == [list(range(0, COUNT, 2)), list(range(1, COUNT, 2))]
    # What a loop sees first is the beginning of its rank's share, so that a count tells what it was.
    assert loaded(stream(2, 1, batch_size=4), workers=2, batch=4) == plain[1]
    trained = stream(2, 0, batch_size=4)
    trained.advance(8)
    resumed = stream(2, 0, batch_size=4)
    resumed.load_state_dict(trained.state_dict())
    assert loaded(resumed, workers=2, batch=4) == plain[0][8:]


class Divided(IterableDataset[int]):
    """Divides itself among the workers of a loader, when it is iterated or when the first sample is read."""

    def __init__(self, early: bool) -> None:
        self.early = early

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers()) if self.early else iter(number for number in self._later())

    def _later(self) -> Iterator[int]:
        yield from self._numbers()

    def _numbers(self) -> range:
        worker = get_worker_info()
        return range(COUNT) if worker is None else range(worker.id, COUNT, worker.num_workers)


@short("workers, early", product([0, 1, 2], [True, False]), [(0, True), (0, False), (1, True), (2, False)])
def test_dataset_that_divides_itself_is_divided_once(early: bool, workers: int) -> None:
    """A second division would leave samples out."""
    ranks = [StreamPartition(Divided(early), num_replicas=2, rank=rank, batch_size=4) for rank in range(2)]
    assert sorted(chain.from_iterable(loaded(rank, workers, 4) for rank in ranks)) == list(range(COUNT))
    shares = [ShardPartition("ab", lambda _: Divided(early), num_replicas=2, rank=rank) for rank in range(2)]
    for share in shares:
        assert sorted(loaded(share, workers, 4)) == list(range(COUNT))


def test_worker_is_known_again_between_samples() -> None:
    def known(numbers: Any) -> Iterator[int]:
        for _ in numbers:
            worker = get_worker_info()
            yield -1 if worker is None else worker.id

    class Outer(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return known(stream(1, 0))

    assert set(loaded(Outer(), 2, 1)) == {0, 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_loader_keeps_stream_state(workers: int) -> None:
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="its loader is tested")
    load = package.StatefulDataLoader
    for make in (
        lambda: stream(2, 0, batch_size=4),
        lambda: ShardPartition(["a", "bb", "ccc", "dddd"], Shard(), num_replicas=1, rank=0),
    ):
        whole = [b if isinstance(b, list) else b.tolist() for b in load(make(), 4, num_workers=workers)]
        old = load(make(), 4, num_workers=workers)
        first = [b if isinstance(b, list) else b.tolist() for b in islice(old, 2)]
        again = load(make(), 4, num_workers=workers)
        again.load_state_dict(old.state_dict())
        assert first + [b if isinstance(b, list) else b.tolist() for b in again] == whole


def test_set_epoch_reaches_the_stream() -> None:
    class Told(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    told = Told(range(5))
    share = StreamPartition(told)
    share.advance(3)
    share.set_epoch(2)
    assert (told.epoch, list(share)) == (2, [0, 1, 2, 3, 4])


def test_wrong_stream_states_are_rejected() -> None:
    with pytest.raises(ValueError, match="must be those of a StreamPartition"):
        stream(1, 0).load_state_dict({"format": "x"})
    with pytest.raises(ValueError, match="batch_size"):
        stream(1, 0, batch_size=0)
    with pytest.raises(ValueError, match="trained on -1"):
        stream(1, 0).advance(-1)


# -- shards --------------------------------------------------------------------------------------------
class Shard:
    """Reads a shard: as many samples as its name has letters, times three."""

    def __call__(self, name: str) -> Iterator[str]:
        return (f"{name}{number}" for number in range(3 * len(name)))


NAMES = [chr(97 + number) * (1 + number % 4) for number in range(11)]
ALL = sorted(chain.from_iterable(map(Shard(), NAMES)))


def shards(size: int, rank: int, **options: Any) -> ShardPartition[str]:
    return ShardPartition(NAMES, Shard(), num_replicas=size, rank=rank, **options)


@pytest.mark.parametrize("size", [1, 2, 3, 15])
def test_every_shard_is_read_once(size: int) -> None:
    assert sorted(chain.from_iterable(shards(size, rank) for rank in range(size))) == ALL


def test_workers_share_the_shards_of_a_rank() -> None:
    found = []
    for rank in range(2):
        for batch in DataLoader(shards(2, rank), batch_size=5, num_workers=2):
            found += batch
    assert sorted(found) == ALL


def test_epochs_shuffle_shards() -> None:
    reader = shards(1, 0)
    first = list(reader)
    reader.set_epoch(1)
    assert list(reader) != first
    assert sorted(reader) == ALL
    assert list(shards(1, 0, shuffle=False)) == list(chain.from_iterable(map(Shard(), NAMES)))


@given(path=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_remaining_shards_go_to_the_other_ranks(path: list[int], data: st.DataObject) -> None:
    done: list[str] = []
    states: list[dict[str, Any]] = []
    for size in path:
        ranks = [shards(size, rank) for rank in range(size)]
        for rank in ranks if states else ():
            rank.load_state_dict(states)
        held = []
        for rank in ranks:
            part = list(rank)
            held.append(part)
            for step in data.draw(st.lists(st.integers(0, 9), max_size=3)):
                rank.advance(min(step, len(part)))
                done += part[:step]
                del part[:step]
        assert sorted(chain(done, *held)) == ALL
        for rank, part in zip(ranks, held, strict=True):
            assert list(rank) == part
        states = [rank.state_dict() for rank in ranks]


def test_shards_need_all_states() -> None:
    reader = shards(2, 0)
    list(reader)
    reader.advance(1)
    with pytest.raises(ValueError, match="states of all 2, as a list"):
        shards(3, 0).load_state_dict(reader.state_dict())
    with pytest.raises(ValueError, match="must be those of a ShardPartition"):
        shards(3, 0).load_state_dict([])
    with pytest.raises(ValueError, match="state has 11 shards, but this partition has 1"):
        ShardPartition(["a"], Shard(), num_replicas=2, rank=0).load_state_dict(reader.state_dict())
    with pytest.raises(ValueError, match="has not read 1000 more samples"):
        reader.advance(1000)


def test_lines_of_local_and_remote_files(tmp_path: Path) -> None:
    import fsspec

    near = tmp_path / "a.txt"
    near.write_text("one\ntwo\n")
    with fsspec.open("memory://b.txt", "wt") as file:
        file.write("three\n")
    urls = [str(near), "memory://b.txt"]
    assert sorted(ShardPartition(urls, read_lines)) == ["one", "three", "two"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: StreamPartition(range(9)),
        pytest.param(lambda: ShardPartition(["a"], lambda _: range(9)), marks=pytest.mark.soak),
    ],
)
def test_persistent_workers_skip_nothing_silently(make: Any) -> None:
    saved = make()
    iterator = iter(saved)
    for _ in range(4):
        next(iterator)
    saved.advance(4)
    resumed = make()
    resumed.load_state_dict(saved.state_dict())
    loader = DataLoader(resumed, batch_size=None, num_workers=1, persistent_workers=True)
    assert list(loader) == [4, 5, 6, 7, 8]
    resumed.set_epoch(1)
    with pytest.raises(RuntimeError, match="persistent_workers=True hides set_epoch") as refused:
        list(loader)
    # Torch's frames hold their own error, and with it loaders whose workers end late when garbage is collected.
    traceback.clear_frames(refused.value.__traceback__)
    del refused
    anew = DataLoader(make(), batch_size=None, num_workers=1, persistent_workers=True)
    assert list(anew) == list(anew) == list(range(9))
