"""Weights as one flat buffer: nothing changes on the way, and nothing wrong is taken."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from estr.cluster.flat import Entry, pack, unpack
from estr.errors import WeightsError


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(5, 3, generator=generator)
    return {
        "matrix": matrix,
        "turned": matrix.T,
        "tied": matrix,
        "half": torch.randn(7, generator=generator).bfloat16(),
        "count": torch.tensor(9, dtype=torch.int64),
        "none": torch.zeros(0, 4),
        "nothing_wide": torch.zeros(3, 0),
    }


def test_what_is_packed_comes_out_bit_for_bit() -> None:
    manifest, flat = pack(3, state())
    assert flat.dtype == "uint8"
    assert manifest.num_bytes == flat.nbytes == 5 * 64
    assert manifest.entries[3] == Entry("half", "bfloat16", (7,), 192)
    flat.setflags(write=False)
    found = unpack(manifest, 3, flat)
    assert list(found) == list(state())
    for name, tensor in state().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    found["matrix"].zero_()
    assert torch.equal(unpack(manifest, 3, flat)["matrix"], state()["matrix"])


@pytest.mark.parametrize("place", [0, 100, 319])
def test_one_changed_byte_is_seen(place: int) -> None:
    manifest, flat = pack(3, state())
    flat[place] ^= 1
    with pytest.raises(WeightsError, match="the flat buffer is not version 3 as published"):
        unpack(manifest, 3, flat)


def test_a_wrong_label_is_seen() -> None:
    manifest, flat = pack(3, state())
    with pytest.raises(WeightsError, match=r"not version 4 .* its manifest says version 3"):
        unpack(manifest, 4, flat)
    with pytest.raises(WeightsError, match="not version 4"):
        unpack(dataclasses.replace(manifest, version=4), 4, flat)
    with pytest.raises(WeightsError, match="found 256 bytes"):
        unpack(manifest, 3, flat[:-64])
    moved = (dataclasses.replace(manifest.entries[0], offset=64), *manifest.entries[1:])
    with pytest.raises(WeightsError, match="not version 3 as published"):
        unpack(dataclasses.replace(manifest, entries=moved), 3, flat)
