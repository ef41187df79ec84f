"""Both weight stores keep one contract; the file store also survives torn and foreign files."""

import hashlib
import json
import pickle
import resource
import threading
from pathlib import Path

import pytest
import torch

from estr.errors import WeightsError
from estr.weights import FileWeightStore, MemoryWeightStore


def state(value: float) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.full((2, 3), value),
        "bias": torch.tensor([value, -value], dtype=torch.bfloat16),
        "steps": torch.tensor(int(value)),
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.fixture(params=["memory", "file"])
def make_store(request, tmp_path):
    """Makes a store that keeps so many versions."""
    if request.param == "memory":
        return MemoryWeightStore
    return lambda keep=6: FileWeightStore(tmp_path / "weights", keep=keep)


# The contract of both


def test_what_is_published_is_fetched(make_store):
    store = make_store()
    digests = {store.publish(version, state(version)) for version in (0, 1, 7)}
    assert len(digests) == 3
    for version in (0, 1, 7):
        assert_same(store.fetch(version), state(version))
    assert store.latest() == 7


def test_an_empty_store_says_so(make_store):
    store = make_store()
    assert store.latest() is None
    with pytest.raises(WeightsError, match=r"version 0 .*holds \[\]"):
        store.fetch(0)


@pytest.mark.parametrize("version", [0, 2, 4])
def test_a_missing_version_is_named_with_those_that_exist(make_store, version):
    store = make_store()
    store.publish(1, state(1))
    store.publish(3, state(3))
    with pytest.raises(WeightsError, match=rf"version {version} .*\[1, 3\]"):
        store.fetch(version)


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(make_store, keep):
    store = make_store(keep=keep)
    for version in range(8):
        store.publish(version, state(version))
        oldest = max(0, version - keep + 1)
        for kept in range(oldest, version + 1):
            assert_same(store.fetch(kept), state(kept))
        if oldest:
            with pytest.raises(WeightsError):
                store.fetch(oldest - 1)


@pytest.mark.parametrize("keep", [0, -1])
def test_a_store_that_keeps_nothing_is_refused(make_store, keep):
    with pytest.raises(ValueError, match=f"at least 1 version, not {keep}"):
        make_store(keep=keep)


def test_the_store_does_not_follow_later_changes(make_store):
    store = make_store()
    published = state(1)
    store.publish(1, published)
    published["weight"].fill_(99)
    fetched = store.fetch(1)
    assert_same(fetched, state(1))
    fetched["weight"].fill_(99)
    assert_same(store.fetch(1), state(1))


def test_a_trained_parameter_is_stored_without_its_graph(make_store):
    store = make_store()
    parameter = torch.nn.Parameter(torch.ones(2))
    store.publish(0, {"p": parameter, "transposed": (parameter * torch.ones(3, 2)).T})
    fetched = store.fetch(0)
    assert not any(t.requires_grad for t in fetched.values())
    assert fetched["transposed"].shape == (2, 3)


@pytest.mark.parametrize(
    "tie",
    [
        lambda t: t,
        lambda t: t.view(6),
        lambda t: t[1],
        lambda t: t.T,
    ],
    ids=["same", "view", "slice", "transposed"],
)
def test_tied_tensors_travel_under_both_names(make_store, tie):
    store = make_store()
    embedding = torch.arange(6.0).reshape(2, 3)
    store.publish(0, {"embedding": embedding, "head": tie(embedding)})
    assert_same(store.fetch(0), {"embedding": embedding, "head": tie(embedding).contiguous()})


def test_publishing_again_replaces(make_store):
    store = make_store()
    store.publish(3, state(3))
    store.publish(3, state(30))
    assert_same(store.fetch(3), state(30))


@pytest.mark.parametrize("start", [0, 3])
def test_versions_left_over_from_another_course_are_forgotten_check_65(make_store, start):
    store = make_store(keep=6)
    for version in range(6):
        store.publish(version, state(version))
    store.publish(start, state(100))
    assert store.latest() == start
    assert_same(store.fetch(start), state(100))
    for version in range(start + 1, 6):
        with pytest.raises(WeightsError):
            store.fetch(version)
    for version in range(start):
        assert_same(store.fetch(version), state(version))


# The file store


@pytest.fixture
def files(tmp_path):
    store = FileWeightStore(tmp_path)
    for version in (1, 2):
        store.publish(version, state(version))
    return store


def paths(store, version):
    stem = store.folder / f"v{version:08d}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".json")


def test_the_digest_is_that_of_the_file(files):
    file, manifest = paths(files, 2)
    label = json.loads(manifest.read_text())
    assert label["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert label["sha256"] == files.publish(2, state(2))


@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_torn_file_is_refused(files, where):
    file, _ = paths(files, 2)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * where) if where >= 0 else -1])
    with pytest.raises(WeightsError, match="not version 2 as published"):
        files.fetch(2)
    assert_same(files.fetch(1), state(1))


def test_every_flipped_byte_is_noticed(files):
    file, _ = paths(files, 2)
    data = file.read_bytes()
    for at in range(0, len(data), 7):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(WeightsError):
            files.fetch(2)


def test_weights_of_another_version_under_this_label_are_refused(files):
    paths(files, 1)[0].replace(paths(files, 2)[0])
    with pytest.raises(WeightsError, match="not version 2 as published"):
        files.fetch(2)


def test_another_version_moved_here_with_its_label_is_refused(files):
    for source, target in zip(paths(files, 1), paths(files, 2), strict=True):
        source.replace(target)
    with pytest.raises(WeightsError, match="not version 2 as published"):
        files.fetch(2)


@pytest.mark.parametrize(
    "label", ["", "{", "[]", "null", '{"version": 2}', "\udcff", "[" * 100_000]
)
def test_a_torn_or_foreign_label_is_refused(files, label):
    paths(files, 2)[1].write_bytes(label.encode(errors="surrogateescape"))
    with pytest.raises(WeightsError, match="version 2"):
        files.fetch(2)


def test_a_well_labelled_file_of_another_kind_is_refused(files):
    file, manifest = paths(files, 2)
    data = b"not tensors"
    file.write_bytes(data)
    label = {"version": 2, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(label))
    with pytest.raises(WeightsError, match="not a safetensors file"):
        files.fetch(2)


def test_a_version_exists_exactly_when_its_label_does(files):
    paths(files, 2)[1].unlink()
    assert files.versions() == [1]
    assert files.latest() == 1
    with pytest.raises(WeightsError, match="version 2 is not readable"):
        files.fetch(2)


def test_a_label_without_its_file_is_refused(files):
    paths(files, 2)[0].unlink()
    with pytest.raises(WeightsError, match="version 2 is not readable"):
        files.fetch(2)


def test_foreign_and_unfinished_files_are_no_versions(files):
    for name in ("vocab.json", "v1.json", ".v00000009.json.123", "v00000009.safetensors"):
        (files.folder / name).write_text("{}")
    assert files.versions() == [1, 2]
    files.publish(3, state(3))
    assert files.versions() == [1, 2, 3]


def test_nothing_but_the_versions_stays_in_the_folder(tmp_path):
    store = FileWeightStore(tmp_path, keep=2)
    for version in range(5):
        store.publish(version, state(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "v00000003.json",
        "v00000003.safetensors",
        "v00000004.json",
        "v00000004.safetensors",
    ]


def test_another_process_opens_the_same_folder(files):
    other = pickle.loads(pickle.dumps(files))
    files.publish(3, state(3))
    assert other.latest() == 3
    assert_same(other.fetch(3), state(3))


def test_a_reader_sees_whole_versions_or_none_while_one_is_replaced(tmp_path):
    store = FileWeightStore(tmp_path)
    store.publish(0, state(0))
    done = threading.Event()
    seen = []

    def read():
        last = False
        while not last:
            last = done.is_set()
            try:
                fetched = store.fetch(0)
            except WeightsError:
                continue
            seen.append((int(fetched["steps"]), fetched["weight"].tolist()))

    reader = threading.Thread(target=read)
    reader.start()
    for value in range(1, 40):
        store.publish(0, state(value))
    done.set()
    reader.join(timeout=10)
    assert not reader.is_alive()
    assert seen[-1][0] == 39
    assert all(weight == [[value] * 3] * 2 for value, weight in seen)


def test_a_version_that_finds_no_room_leaves_nothing(tmp_path: Path) -> None:
    store = FileWeightStore(tmp_path)
    store.publish(1, {"w": torch.zeros(10)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(WeightsError, match=r"write .*v00000002\.safetensors, \d+ bytes"):
            store.publish(2, {"w": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.versions() == [1]
    assert len(list(tmp_path.iterdir())) == 2, "of version 2 nothing is left"
